"""`launch ssh` with a stand-in for ssh that runs the far command here; the real ssh is in `tests/hosts`."""

import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from openpi_train_configs.debug import debug

from openpi_train.launch import launchers, remote, ssh
from openpi_train.launch.options import Here, PerNode
from openpi_train.launch.preflight import SIZES_LINE, RunSizes
from openpi_train.parallel.strategy import ShardingConfig
from openpi_train.runtime.exits import UsageError
from openpi_train.training.dry_run import check_ahead

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENT = ["--", "debug", "--exp-name", "x"]
# Like ssh, it is not the parent in whose company the far side dies: only the end of stdin tells that.
STAND_IN = """
import os, subprocess, sys
if sys.argv[1] == "away":
    sys.stderr.write("ssh: connect to host away port 22: No route to host\\n")
    sys.exit(255)
if sys.argv[2] == "true":
    sys.exit(255 * os.path.exists(sys.argv[0].replace("ssh.py", sys.argv[1] + ".gone")))
open(sys.argv[0].replace("ssh.py", sys.argv[1] + ".pid"), "w").write(str(os.getpid()))
print("Welcome to", sys.argv[1], flush=True)
sys.exit(subprocess.Popen(["sh", "-c", sys.argv[2]], start_new_session=True).wait())
"""


class Launcher:
    """`launch ssh` on stand-in hosts, where every process runs the Python text `child`; `rank` is known there."""

    def __init__(self, folder: Path, child: str, hosts: str = "node1,ann@node2", *options: str, per_node: int = 2):
        self.folder = folder
        (folder / "ssh.py").write_text(STAND_IN)
        begin = "import os, signal, subprocess, sys, time\nfrom pathlib import Path\nrank = int(os.environ['RANK'])\n"
        (folder / "child.py").write_text(begin + textwrap.dedent(child))
        python = folder / "python"
        python.write_text(
            f'#!/bin/sh\ncase "$2" in\nopenpi_train) exec {sys.executable} {folder}/child.py;;\n'
            f'*) exec {sys.executable} "$@";;\nesac\n'
        )
        python.chmod(0o755)
        words = [
            "--no-check",
            "--hosts",
            hosts,
            "--processes-per-node",
            per_node,
            "--ssh-command",
            f"{sys.executable} {folder}/ssh.py",
        ]
        words += ["--python", python, "--log-dir", folder / "output", "--grace-s", 60, *options, *EXPERIMENT]
        command = [sys.executable, "-m", "openpi_train", "launch", "ssh", *map(str, words)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def end(self) -> tuple[int, list[str], list[str]]:
        """Exit code, and the lines of stdout and stderr."""
        out, err = self.process.communicate(timeout=240)
        return self.process.returncode, out.splitlines(), err.splitlines()

    def output(self, rank: int) -> str:
        path = self.folder / "output" / f"process_{rank}.txt"
        return path.read_text() if path.exists() else ""

    def wait_until_all_say(self, word: str, count: int = 4) -> list[int]:
        """The number that each process has said after `word`."""
        wait_for(lambda: all(f"{word} " in self.output(rank) for rank in range(count)))
        return [int(self.output(rank).partition(f"{word} ")[2].split()[0]) for rank in range(count)]


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Launcher]]:
    """Start a `Launcher`, which is gone after the test in any case."""
    started = []

    def one(*arguments: str, **options: int) -> Launcher:
        started.append(Launcher(tmp_path, *arguments, **options))
        return started[-1]

    yield one
    for launcher in started:
        launcher.process.kill()
        launcher.process.communicate()


def wait_for(condition, timeout_s: float = 240.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_dry_run_prints_the_ssh_line_of_each_host_and_its_processes(capsys):
    options = ["ssh", "--hosts", "node1,ann@node2", "--gpus-per-node", "2", "--workdir", "/my work", "--dry-run"]
    assert launchers.main([*options, "--python", "/venv/bin/python", "--ssh-command", "ssh -i key", *EXPERIMENT]) == 0
    lines = capsys.readouterr().out.splitlines()
    far = "cd '\"'\"'/my work'\"'\"' && exec /venv/bin/python -m openpi_train.launch.remote"
    assert lines[0] == f"ssh -i key node1 '{far}'" and lines[3] == f"ssh -i key ann@node2 '{far}'"
    assert [line.split()[0] for line in lines if line.startswith(" ")] == [f"RANK={rank}" for rank in range(4)]
    assert all("MASTER_ADDR=node1 " in line for line in lines if line.startswith(" "))


def test_hosts_are_read_from_a_file_with_comments(capsys, tmp_path):
    (tmp_path / "hosts").write_text("# the good ones\nann@node1  # rack 3\n\nnode2\n")
    options = ["ssh", "--hosts-file", str(tmp_path / "hosts"), "--processes-per-node", "1", "--dry-run"]
    assert launchers.main([*options, *EXPERIMENT]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [word for line in lines for word in line.split() if word in ("ann@node1", "node2")] == ["ann@node1", "node2"]
    assert "MASTER_ADDR=node1 " in lines[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hosts", "node1,ann@node1"], "node1 named more than once"),
        (["--hosts", "node1 slots=4"], "'node1 slots=4' is no name"),
        (["--hosts", "node1,-oProxyCommand=x"], "is no name"),
        (["--hosts", ","], "no host is named"),
        (["--hosts-file", "/nowhere"], "--hosts-file /nowhere: No such file"),
        (["--hosts", "node1", "--min-nodes", "1"], "also give --max-restarts"),
        (["--hosts", "node1", "--min-nodes", "2", "--max-restarts", "1"], "--min-nodes 2 is not from 1 to 1"),
        (["--hosts", "node1", "--env", "SURELY_NOT_SET"], "SURELY_NOT_SET=<value>"),
    ],
)
def test_hosts_that_cannot_be_are_refused(words, message, capsys):
    assert launchers.main(["ssh", *words, "--processes-per-node", "1", *EXPERIMENT]) == 2
    assert message in capsys.readouterr().err


def test_variables_go_to_the_hosts_as_given_or_as_they_are_here(monkeypatch):
    monkeypatch.setenv("HERE", "a b=c")
    assert ssh._variables(["GIVEN=x=y $z", "HERE", "EMPTY="]) == {"GIVEN": "x=y $z", "HERE": "a b=c", "EMPTY": ""}


@pytest.mark.multiprocess
def test_a_good_run_shows_each_line_with_its_host_and_keeps_everything(start, tmp_path):
    child = "print('step', rank, os.environ['COLOUR'], os.getcwd()); sys.stderr.write(f'note {rank} é\\n')"
    run = start(child, "node1,ann@node2", "--env", "COLOUR=a b", "HOME", "--workdir", str(tmp_path))
    code, out, err = run.end()
    assert (code, err) == (0, [])
    assert out[0].startswith("starting 4 processes on node1, node2; output of each: ")
    notes = [f"[node{1 + rank // 2}:{rank}] note {rank} é" for rank in range(4)]
    assert sorted(out[1:]) == sorted([*notes, f"[node1:0] step 0 a b {tmp_path}"])
    for rank in range(4):
        assert sorted(run.output(rank).splitlines()) == [f"note {rank} é", f"step {rank} a b {tmp_path}"]


@pytest.mark.multiprocess
def test_the_token_is_the_same_everywhere_and_on_no_command_line(start, tmp_path):
    run = start(
        """
        token = os.environ["OPENPI_TRAIN_JOB_TOKEN"]
        lines = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                lines.append(path.read_bytes())
            except OSError:
                pass  # that process has ended meanwhile
        print("token", token, sum(token.encode() in line for line in lines), len(lines) > 3)
        """,
    )
    assert run.end()[0] == 0
    said = {run.output(rank) for rank in range(4)}
    assert len(said) == 1
    _, token, seen, looked = said.pop().split()
    assert len(token) == 32 and (seen, looked) == ("0", "True")


@pytest.mark.multiprocess
def test_the_failure_of_one_ends_all_hosts_with_its_error_last_and_its_code(start, tmp_path):
    child = """
        print("pid", os.getpid(), flush=True)
        if rank == 3:
            while any("pid" not in Path(f"%s/output/process_{other}.txt").read_text() for other in range(3)):
                time.sleep(0.05)
            sys.stderr.write("episode 7 is torn\\n")
            sys.exit(3)
        if rank == 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
        """
    run = start(child % tmp_path, "node1,ann@node2", "--grace-s", "1")
    code, _, err = run.end()
    assert code == 3
    assert err == [
        "[node2:3] episode 7 is torn",
        f"process 3 on node2 failed with exit code 3: see {tmp_path}/output/process_3.txt",
    ]
    assert not any(is_running(pid) for pid in run.wait_until_all_say("pid"))


@pytest.mark.multiprocess
@pytest.mark.parametrize(("signum", "expected"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_signals_reach_all_hosts_and_are_waited_for(start, tmp_path, signum, expected):
    run = start(
        """
        from openpi_train.launch import status
        def save(signum, frame):
            time.sleep(0.3 * rank)
            status.tell(opened=True, saved_step=40)
            print("saved", flush=True)
            os._exit(75 if signum == signal.SIGTERM else 130)
        signal.signal(signal.SIGTERM, save)
        signal.signal(signal.SIGINT, save)
        print("pid", os.getpid(), flush=True)
        time.sleep(600)
        """,
    )
    run.wait_until_all_say("pid")
    run.process.send_signal(signum)
    code, _, err = run.end()
    assert code == expected
    assert all("saved" in run.output(rank) for rank in range(4))
    assert any("and saved: continue" in line for line in err) == (expected == 75)


UNTIL_TOLD = """
    def save(signum, frame):
        time.sleep(0.5)  # a save takes its time
        Path(f"%s/saved_{rank}").touch()
        os._exit(75)
    signal.signal(signal.SIGTERM, save)
    print("pid", os.getpid(), flush=True)
    time.sleep(600)
    """


@pytest.mark.multiprocess
def test_nothing_is_left_running_when_the_launcher_is_killed_and_the_processes_may_save(start, tmp_path):
    run = start(UNTIL_TOLD % tmp_path)
    pids = run.wait_until_all_say("pid")
    run.process.kill()
    run.process.communicate()
    wait_for(lambda: not any(is_running(pid) for pid in pids))
    assert all((tmp_path / f"saved_{rank}").exists() for rank in range(4))


@pytest.mark.multiprocess
def test_a_lost_connection_ends_the_run_with_70_and_names_the_host(start, tmp_path):
    run = start(UNTIL_TOLD % tmp_path)
    pids = run.wait_until_all_say("pid")
    connection = (tmp_path / "ann@node2.pid").read_text()
    os.kill(int(connection), signal.SIGKILL)
    code, _, err = run.end()
    assert code == 70
    assert err[-2] == "[node2:2] the connection to node2 was lost (ssh ended with code 137)"
    wait_for(lambda: not any(is_running(pid) for pid in pids))
    assert all((tmp_path / f"saved_{rank}").exists() for rank in range(4))


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("hosts", "options", "expected", "said"),
    [
        ("node1,away", (), 70, "No route to host"),
        ("node1", ("--workdir", "/nowhere"), 2, "/nowhere"),
        ("node1", ("--python", "/nowhere/python"), 2, "/nowhere/python"),
    ],
)
def test_a_host_where_nothing_can_be_started_is_named_with_the_reason(start, tmp_path, hosts, options, expected, said):
    run = start("time.sleep(600)", hosts, *options)
    code, _, err = run.end()
    assert code == expected
    host = hosts.rpartition(",")[2]
    assert any(said in line and line.startswith(f"[{host}:") for line in err)
    assert f"nothing could be started on {host}" in err[-2]


@pytest.mark.multiprocess
def test_a_share_that_hears_nothing_more_ends_itself(tmp_path):
    # As when the launcher's host has lost its power: the connection stays open, and no sign of life comes.
    spec = {"arguments": ["import time; time.sleep(600)"], "processes_per_host": 2, "program": [sys.executable, "-c"]}
    job = {"spec": spec, "node": 0, "env": {}, "grace_s": 3.0}
    program = "import sys; from openpi_train.launch import remote; remote.SILENCE_S = 2.0; sys.exit(remote.main())"
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as share:
        assert share.stdin and share.stdout
        share.stdin.write(json.dumps(job).encode() + b"\n")
        share.stdin.flush()
        news = [json.loads(line[1:]) for line in share.stdout]
    assert share.returncode == 0
    assert news[0] == ["started"] and sorted(news[1:]) == [["ended", rank, 128 + signal.SIGTERM] for rank in range(2)]


def test_a_share_lives_as_long_as_it_hears_signs_of_life(monkeypatch, tmp_path):
    """A clock of its own: signs of life come every 40 s of it, and after 61 s without one the share ends itself."""
    now_s, beats = [0.0], []

    class Mail:
        def get(self, timeout):
            if len(beats) == 5:
                now_s[0] += 1
                raise queue.Empty
            now_s[0] += 40
            beats.append(now_s[0])
            return b"{}"

    share = remote.Share(
        {"grace_s": 1.0, "spec": {"arguments": ("x",), "processes_per_host": 1}, "node": 1, "env": {}}, tmp_path
    )
    assert share.children == [], "there is no second host"
    share.alive, share.mail = {0}, Mail()
    monkeypatch.setattr(remote.time, "monotonic", lambda: now_s[0])
    for name in ("_tell", "_listen", "_end"):
        monkeypatch.setattr(share, name, lambda *_: None)
    share.run()
    assert beats == [40, 80, 120, 160, 200] and now_s[0] == 200 + remote.SILENCE_S + 1


FEWER = """
    print("pid", os.getpid(), *map(os.environ.get, ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")), flush=True)
    time.sleep(600 * (os.environ["WORLD_SIZE"] != "2"))
    """


@pytest.mark.multiprocess
def test_a_run_goes_on_without_a_lost_host_from_another_port(start, tmp_path):
    run = start(FEWER, "ann@node2,node1", "--max-restarts", "1", "--min-nodes", "1", "--master-addr", "10.0.0.1")
    run.wait_until_all_say("pid")
    (tmp_path / "ann@node2.gone").touch()
    os.kill(int((tmp_path / "ann@node2.pid").read_text()), signal.SIGKILL)
    code, _, err = run.end()
    assert code == 0, err
    assert "without node2: on node1" in err[-1]
    said = [(tmp_path / "output" / "restart_1" / f"process_{rank}.txt").read_text().split()[2:5] for rank in range(2)]
    assert said == [["2", "node1", "29501"]] * 2
    assert run.output(0).split()[2:5] == ["4", "10.0.0.1", "29500"]


ON_NODE_1 = """
    print("pid", os.getpid(), *map(os.environ.get, ("WORLD_SIZE", "MASTER_ADDR")), flush=True)
    time.sleep(600 * (os.environ["MASTER_ADDR"] == "node1" and "OPENPI_TRAIN_RESTART" not in os.environ))
    """


@pytest.mark.multiprocess
@pytest.mark.parametrize(("is_gone", "then"), [(True, "node2"), (False, "node1")], ids=["gone", "back"])
def test_a_spare_host_takes_the_place_of_one_that_is_gone(start, tmp_path, is_gone, then):
    run = start(ON_NODE_1, "node1,node2,spare", "--nodes", "2", "--max-restarts", "1", per_node=1)
    run.wait_until_all_say("pid", 2)
    if is_gone:
        (tmp_path / "node1.gone").touch()
    os.kill(int((tmp_path / "node1.pid").read_text()), signal.SIGKILL)
    code, _, err = run.end()
    assert code == 0, err
    assert ("without node1: on node2, spare; with spare" in err[-1]) == is_gone, err
    said = [(tmp_path / "output" / "restart_1" / f"process_{rank}.txt").read_text().split()[2:] for rank in range(2)]
    assert said == [["2", then]] * 2


@pytest.mark.multiprocess
def test_a_host_that_cannot_be_reached_is_left_out_where_enough_others_are_there(start):
    run = start(FEWER, "node1,away", "--max-restarts", "1", "--min-nodes", "1")
    code, _, err = run.end()
    assert code == 0, err
    assert "without away: on node1" in err[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # Two hosts of four devices, on which a replica lies: of 1 to 5 hosts, the first divide 32 rows.
        (("debug", "--batch-size", "32", "--fsdp-devices", "8"), [2, 4]),
        (("no-such-experiment",), [1, 2, 3, 4, 5]),  # unknown here: the run checks
    ],
)
def test_the_run_is_asked_on_how_many_hosts_it_can_go_on(arguments, expected):
    launch = ssh.Ssh(
        arguments=arguments, hosts="a", per_node=PerNode(processes_per_node=2), here=Here(devices_per_process=2)
    )
    assert launch.sharing(range(1, 6), 4, ".") == expected


@pytest.mark.parametrize(
    ("changes", "num_at_first", "expected"),
    [
        ({"batch_size": 12}, 2, [1, 3]),  # four devices on each host
        ({"batch_size": 16}, 2, [1, 2, 4]),
        ({"batch_size": 48, "fsdp_devices": 8}, 4, [2, 4, 6]),  # replicas of two hosts
        ({"batch_size": 48, "fsdp_devices": 16}, 4, [4]),
        ({"batch_size": 48, "fsdp_devices": 32}, 8, [1, 2, 3, 4, 6]),  # no whole replica is left: smaller ones
        ({"batch_size": 48, "fsdp_devices": 2}, 4, [1, 2, 3, 4, 6]),
        # Groups of two devices hold the same rows, and two groups a replica.
        ({"batch_size": 20, "sharding": ShardingConfig(tensor_devices=2)}, 4, [1, 2, 5]),
        ({"batch_size": 24, "fsdp_devices": 4, "sharding": ShardingConfig(tensor_devices=2)}, 4, [2, 4, 6]),
        # Three rows for each of the sixteen devices of the first start.
        ({"batch_size": 3, "keep_effective_batch_size": False}, 4, [1, 2, 3, 4, 6]),
    ],
)
def test_the_numbers_of_hosts_that_share_the_batch_and_make_whole_replicas(
    changes, num_at_first, expected, tmp_path, monkeypatch, capsys
):
    """The run answers here, and not in a process of its own."""
    given = dataclasses.replace(debug, exp_name="x", checkpoint_base_dir=str(tmp_path), **changes)

    def ask(arguments, num_devices, folder):
        with contextlib.suppress(UsageError):
            check_ahead(given, num_devices)
        return RunSizes(**json.loads(capsys.readouterr().out.splitlines()[0].removeprefix(SIZES_LINE)))

    monkeypatch.setattr(ssh, "sizes_of_run", ask)
    launch = ssh.Ssh(arguments=(), hosts="a", per_node=PerNode(gpus_per_node=4), here=Here())
    assert launch.sharing(range(1, 8), num_at_first, ".") == expected
