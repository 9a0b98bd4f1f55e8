import errno
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from openpi_train import faults
from openpi_train.launch import processes, spec, status
from openpi_train.launch.status import Status

pytestmark = pytest.mark.multiprocess


SEEN = "print(outcome.code, outcome.status)"


def launcher(
    child: str,
    folder: Path,
    processes: int = 3,
    grace_s: float = 3.0,
    result: str = "sys.exit(outcome.code)",
    **options,
) -> subprocess.Popen:
    """A launcher that runs the Python text `child` in every process, where `rank` is known, and then `result`."""
    child = "import os, signal, sys, time\nrank = int(os.environ['RANK'])\n" + textwrap.dedent(child)
    driver = (
        "import signal, sys\nfrom pathlib import Path\nfrom openpi_train.launch import processes\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # which a suite under `nohup` would have inherited as ignored
        "from openpi_train.launch.spec import LaunchSpec, commands\n"
        f"spec = LaunchSpec(arguments=({child!r},), processes_per_host={processes}, program=(sys.executable, '-c'))\n"
        f"outcome = processes.run(commands(spec), Path({str(folder)!r}), {grace_s})\n"
        f"{result}\n"
    )
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", driver], text=True, **{**streams, **options})


def run(child: str, folder: Path, **options) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a launcher that ran to its end."""
    process = launcher(child, folder, **options)
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def wait_for(condition, timeout_s: float = 240.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_good_run_shows_process_zero_once_and_keeps_everything(tmp_path):
    code, out, err = run("print('step 1 of', rank); sys.stderr.write(f'note {rank}\\n')", tmp_path)
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == ["[0] note 0", "[0] step 1 of 0", "[1] note 1", "[2] note 2"]
    for rank in range(3):
        kept = (tmp_path / f"process_{rank}.txt").read_text().splitlines()
        assert sorted(kept) == [f"note {rank}", f"step 1 of {rank}"]


def test_the_failure_of_one_ends_all_with_its_error_last_and_its_code(tmp_path):
    code, _, err = run(
        """
        if rank == 1:
            sys.stderr.write("episode 7 is torn\\n")
            sys.exit(3)
        time.sleep(600)
        """,
        tmp_path,
    )
    assert code == 3
    assert err.splitlines() == [
        "[1] episode 7 is torn",
        f"process 1 failed with exit code 3: see {tmp_path}/process_1.txt",
    ]


def test_those_who_only_lost_the_failed_process_are_not_blamed(tmp_path):
    """Those who have lost it may well end first."""
    code, _, err = run(
        """
        def leave(*others):
            while not all(os.path.exists(os.path.join(FOLDER, f"left_{other}")) for other in others):
                time.sleep(0.01)
            open(os.path.join(FOLDER, f"left_{rank}"), "w").close()
            os._exit([70, 70, 5][rank])
        leave(*[(), (0,), (0, 1)][rank])
        """.replace("FOLDER", repr(str(tmp_path))),
        tmp_path,
    )
    assert code == 5
    assert err.splitlines()[-1].startswith("process 2 failed with exit code 5")


def test_who_was_told_to_stop_by_somebody_else_is_blamed_before_those_who_lost_it(tmp_path):
    code, _, err = run(
        """
        left = os.path.join(FOLDER, "left")
        if rank != 2:
            open(left, "a").write("x")
            os._exit(70)
        while not os.path.exists(left) or len(open(left).read()) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        """.replace("FOLDER", repr(str(tmp_path))),
        tmp_path,
    )
    assert code == 143
    assert err.splitlines()[-1].startswith("process 2 failed with exit code 143 (signal SIGTERM)")


def test_those_who_lost_one_that_was_told_to_stop_before_it_could_save_are_not_blamed(tmp_path):
    child = """
        left = os.path.join(FOLDER, "left")
        if rank != 2:
            open(left, "a").write("x")
            os._exit(70)
        while not os.path.exists(left) or len(open(left).read()) < 2:
            time.sleep(0.01)
        os._exit(75)
    """.replace("FOLDER", repr(str(tmp_path)))
    assert run(child, tmp_path)[0] == 75
    # The launcher itself tells the others to stop after a failure.
    obedient = """
        if rank == 2:
            os._exit(70)
        signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
        time.sleep(600)
    """
    assert run(obedient, tmp_path)[0] == 70


def test_a_lost_connection_is_named_though_its_processes_then_save_and_stop(tmp_path):
    records = [processes.ProcessRecord(rank, tmp_path, host=f"node{rank}") for rank in range(3)]
    records[0].take(b"the connection to node0 was lost (ssh ended with code 137)\n", True)
    records[0].lose(faults.PEER_LOST)
    for record in records[1:]:
        record.end(faults.PREEMPTED)
    code, reason = processes._report(records, Status(saved_step=7, opened=True), asked=False)
    for record in records:
        record.close()
    lost = "process 0 on node0 failed with exit code 70: the connection to node0 was lost (ssh ended with code 137)"
    assert (code, reason) == (faults.PEER_LOST, lost)


def test_the_reason_of_a_restart_has_the_error_that_is_meant_for_the_user(tmp_path):
    child = """
        sys.stderr.write("12:00:00 E process 2 on node2 was lost (training, step 7)\\nmore of it\\n")
        for number in range(100):
            sys.stderr.write(f"  File {number}, of the stacks of all threads\\n")
        sys.exit(70)
    """
    _, out, _ = run(child, tmp_path, processes=1, result="print(outcome.reason)")
    assert out.splitlines()[-1] == (
        "process 0 failed with exit code 70: process 2 on node2 was lost (training, step 7)"
    )


def test_a_process_that_does_not_end_by_itself_is_killed_after_the_grace_period(tmp_path):
    code, _, _ = run(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank == 0:
            time.sleep(0.5)
            sys.exit(4)
        time.sleep(600)
        """,
        tmp_path,
        grace_s=0.5,
    )
    assert code == 4


def test_processes_that_are_told_to_stop_after_a_failure_get_the_grace_period_to_save(tmp_path):
    code, _, _ = run(
        """
        if rank == 0:
            while not os.path.exists(f"{sys.argv[1]}/listens"):
                time.sleep(0.01)
            sys.exit(4)
        def save(signum, frame):
            time.sleep(3.0)  # far longer than a launcher without patience would wait
            print("saved", flush=True)
            os._exit(75)
        signal.signal(signal.SIGTERM, save)
        open(f"{sys.argv[1]}/listens", "w").close()
        time.sleep(600)
        """.replace("sys.argv[1]", repr(str(tmp_path))),
        tmp_path,
        processes=2,
        grace_s=300.0,
    )
    assert code == 4
    assert (tmp_path / "process_1.txt").read_text() == "saved\n"


def test_a_killed_process_ends_all_and_its_signal_is_named(tmp_path):
    code, _, err = run("os.kill(os.getpid(), 9) if rank == 2 else time.sleep(600)", tmp_path)
    assert code == 128 + 9
    assert "process 2 failed with exit code 137 (signal SIGKILL)" in err.splitlines()[-1]


@pytest.mark.parametrize(("signum", "expected"), [(signal.SIGTERM, 75), (signal.SIGINT, 130), (signal.SIGHUP, 75)])
def test_signals_reach_all_processes_and_are_waited_for(tmp_path, signum, expected):
    process = launcher(
        """
        from openpi_train.launch import status
        def save(signum, frame):
            time.sleep(0.3 * rank)
            status.tell(opened=True, saved_step=40)
            print("saved", flush=True)
            os._exit(75 if signum == signal.SIGTERM else 130)
        signal.signal(signal.SIGTERM, save)
        signal.signal(signal.SIGINT, save)
        print("ready", flush=True)
        time.sleep(600)
        """,
        tmp_path,
        grace_s=5.0,
    )
    files = [tmp_path / f"process_{rank}.txt" for rank in range(3)]
    wait_for(lambda: all(path.exists() and "ready" in path.read_text() for path in files))
    process.send_signal(signum)
    _, err = process.communicate(timeout=240)
    assert process.returncode == expected
    assert all("saved" in path.read_text() for path in files)
    assert ("stopped on request at step 40, and saved: continue" in err) == (expected == 75)


def test_a_stop_before_the_processes_listen_is_a_stop_and_no_failure(tmp_path):
    process = launcher('print("ready", flush=True)\ntime.sleep(600)', tmp_path, processes=1)
    said = tmp_path / "process_0.txt"
    wait_for(lambda: said.exists() and "ready" in said.read_text())
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 75 and "failed" not in err
    assert "before this start had anything new to save" in err.splitlines()[-1]


@pytest.mark.parametrize(("opened", "how"), [(True, "the same command and --resume"), (False, "the same command")])
def test_a_stop_before_anything_was_saved_is_told_as_that(tmp_path, opened, how):
    child = "from openpi_train.launch import status\nstatus.tell(opened=OPENED)\nsys.exit(75)"
    code, _, err = run(child.replace("OPENED", str(opened)), tmp_path, processes=1)
    assert code == 75 and "and saved" not in err and err.endswith(f"anything new to save: start again with {how}\n")


SHARED = """
    who = f"process {rank}: " if rank else ""
    if rank:
        while "8 GiB" not in open(os.path.join(FOLDER, "process_0.txt")).read():
            time.sleep(0.01)
    sys.stderr.write(f"12:00:0{rank} I host {rank}\\n12:00:0{rank} E {who}it does not fit\\n")
    sys.stderr.write("What to do:\\n  buy 8 GiB\\n")
    sys.exit(2)
"""


def test_an_error_of_all_processes_is_shown_once_and_of_process_0(tmp_path):
    child = SHARED.replace("FOLDER", repr(str(tmp_path)))
    code, out, err = run(child, tmp_path)
    error = ["[0] 12:00:00 E it does not fit", "[0] What to do:", "[0]   buy 8 GiB"]
    assert code == 2 and [line for line in out.splitlines() if " I " not in line] == error
    assert err.splitlines() == [*error, f"process 0 failed with exit code 2: see {tmp_path}/process_0.txt"]
    assert "What to do" in (tmp_path / "process_2.txt").read_text()
    # A terminal, or a log with both, has it once altogether.
    _, out, _ = run(child, tmp_path, stderr=subprocess.STDOUT)
    assert out.count("it does not fit") == out.count("What to do") == 1 and "process 0 failed" in out


def test_errors_that_differ_and_stacks_are_shown_whole(tmp_path):
    child = (
        'sys.stderr.write(f"12:00:00 E ended by an unexpected error\\nTraceback\\nKeyError: {rank}\\n"); sys.exit(1)'
    )
    _, out, _ = run(child, tmp_path, processes=2)
    assert out.count("Traceback") == 2 and "[1] KeyError: 1" in out


def test_a_second_signal_ends_processes_that_are_still_saving_at_once(tmp_path):
    process = launcher(
        """
        def save(signum, frame):
            print("saving", flush=True)
            time.sleep(30)
            os._exit(75)
        signal.signal(signal.SIGTERM, save)
        print("ready", flush=True)
        time.sleep(600)
        """,
        tmp_path,
        processes=1,
    )
    path = tmp_path / "process_0.txt"
    for word in ("ready", "saving"):
        wait_for(lambda word=word: path.exists() and word in path.read_text())
        process.send_signal(signal.SIGTERM)
    process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGKILL, "75: it was waited for"


def test_a_closed_terminal_stops_nothing_under_nohup(monkeypatch):
    monkeypatch.setattr(signal, "getsignal", lambda signum: signal.SIG_IGN)  # as `nohup` leaves SIGHUP
    assert signal.SIGHUP not in processes.stop_signals()
    monkeypatch.setattr(signal, "getsignal", lambda signum: signal.SIG_DFL)
    assert signal.SIGHUP in processes.stop_signals()


def test_the_launcher_reads_how_far_process_0_got(tmp_path):
    """From the file that it named to the process, whatever is printed; not from that of an earlier run."""
    (tmp_path / "process_0.status.json").write_text('{"opened": true, "saved_step": 70}')
    child = """
        from openpi_train.launch import status
        print("I run directory: /runs/x", "I saving checkpoint 99 in /runs/x", flush=True)
        if rank == 1:
            status.tell(opened=True, saved_step=30)
        elif FAR:
            status.tell(opened=True)
            status.tell(saved_step=10)
            status.tell(saved_step=20)
        sys.exit(6)
    """
    for far, expected in ((False, Status()), (True, Status(opened=True, saved_step=20))):
        code, out, _ = run(child.replace("FAR", str(far)), tmp_path, processes=2, result=SEEN)
        assert (code, out.splitlines()[-1]) == (0, f"6 {expected}")


def test_a_status_file_is_whole_or_as_it_was(tmp_path, monkeypatch):
    status.tell(saved_step=1)  # no launcher: nothing to write to
    file = tmp_path / "status.json"
    monkeypatch.setenv(status.VARIABLE, str(file))
    status.tell(opened=True)
    with monkeypatch.context() as broken:
        broken.setattr(os, "replace", lambda *names: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        status.tell(saved_step=10)
    assert status.read(file) == Status(opened=True)
    for torn in ("", "[1]", '{"opened": true, "nothing": 1}', '{"opened"'):
        file.write_text(torn)
        assert status.read(file) == Status()


@pytest.mark.parametrize("gone", ["pipe", "disk"])
def test_a_terminal_that_is_gone_stops_nobody(tmp_path, gone):
    text = "for number in range(20000): print(number, flush=True)"
    with open("/dev/full", "wb") as full:
        streams = {} if gone == "pipe" else {"stdout": full, "stderr": full}
        process = launcher(text, tmp_path, processes=2, **streams)
    if gone == "pipe":
        process.stdout.readline()
        process.stdout.close()
        process.stderr.close()
    assert process.wait(timeout=240) == 0
    for rank in (0, 1):
        assert (tmp_path / f"process_{rank}.txt").read_text().split() == [str(number) for number in range(20000)]


def test_a_long_file_of_output_goes_on_in_a_new_one(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_MOST_BYTES", 25)
    record = processes.ProcessRecord(3, tmp_path)
    for number in range(7):
        record.take(b"line number %d\n" % number, is_error=False)
    record.close()
    assert (tmp_path / "process_3.txt").read_text() == "line number 6\n"
    assert (tmp_path / "process_3.txt.1").read_text() == "line number 4\nline number 5\n"


def test_what_processes_started_is_cleared_away(tmp_path):
    code, _, _ = run(
        """
        import subprocess
        worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print("worker", worker.pid, flush=True)
        sys.exit(3)
        """,
        tmp_path,
        processes=1,
    )
    assert code == 3
    worker = int((tmp_path / "process_0.txt").read_text().split()[1])
    wait_for(lambda: not is_running(worker))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children that their parent died")
def test_processes_end_with_a_killed_launcher(tmp_path):
    process = launcher("print('pid', os.getpid(), flush=True); time.sleep(600)", tmp_path, processes=1)
    path = tmp_path / "process_0.txt"
    wait_for(lambda: path.exists() and path.read_text().endswith("\n"))
    child = int(path.read_text().split()[1])
    process.kill()
    process.communicate()
    wait_for(lambda: not is_running(child))


RUN = """
    from openpi_train.launch import status
    from openpi_train.runtime import agree, exits, logs, preempt, session
    from openpi_train.runtime.world import WorldFlags, find_world
    session.software = dict  # a file saved in an editor while processes start is no failure of theirs
    def main():
        logs.configure(rank)
        session.start(find_world(WorldFlags(), os.environ), devices_per_process=1)
        import numpy as np
        from jax.experimental import multihost_utils
        for step in range(2000):
            assert multihost_utils.process_allgather(np.asarray(rank)).tolist() == [0, 1]
            if step == 1:
                print("training", flush=True)
            if preempt.stop_requested():
                status.tell(opened=True, saved_step=step)
                session.stop()
                raise exits.Preempted("saved")
            time.sleep(0.02)
    exits.run_guarded(main)
"""


def start_run(folder: Path) -> tuple[subprocess.Popen, list[int]]:
    """A launcher with two processes that train together, and the pids of those."""
    child = textwrap.dedent(RUN).replace('"training"', '"training", os.getpid()')
    process = launcher(child, folder, processes=2, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    files = [folder / f"process_{rank}.txt" for rank in range(2)]
    wait_for(
        lambda: process.poll() is not None or all(path.exists() and "training" in path.read_text() for path in files)
    )
    assert process.poll() is None, process.communicate()
    return process, [int(path.read_text().partition("training ")[2].split()[0]) for path in files]


def test_sigterm_to_the_launcher_stops_a_run_after_a_good_save(tmp_path):
    process, _ = start_run(tmp_path)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 75, err
    assert "and saved: continue" in err.splitlines()[-1]


def test_killing_one_process_of_a_run_ends_it_and_blames_the_killed_one(tmp_path):
    process, pids = start_run(tmp_path)
    os.kill(pids[1], signal.SIGKILL)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGKILL
    assert err.splitlines()[-1].startswith("process 1 failed with exit code 137 (signal SIGKILL)")
    assert "another process or the network to it was lost" in out
    assert not any(is_running(pid) for pid in pids)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_greetings_of_gloo_are_kept_and_not_shown_also_where_two_are_torn(tmp_path, capfdbinary):
    record = processes.ProcessRecord(0, tmp_path)
    greeting = b"0 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3\n"
    lines = [b"[Gloo] Rank " + greeting, b"[Gloo] Rank [Gloo] Rank " + greeting, greeting, b"0 is connected\n"]
    for line in lines:
        record.take(line, False)
    record.close()
    assert capfdbinary.readouterr().out == b"[0] 0 is connected\n"
    assert record.path.read_bytes() == b"".join(lines)


def test_a_host_whose_hardware_has_failed_is_lost_as_one_that_cannot_be_reached(tmp_path):
    records = [processes.ProcessRecord(rank, tmp_path, host) for rank, host in enumerate("abc")]
    for record, code in zip(records, (70, 71, 70), strict=True):
        record.end(code)
    outcome = processes.oversee([], records, grace_s=0.0)
    assert (outcome.code, outcome.lost_hosts) == (71, ("b",))


@pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning")  # other tests import jax
def test_a_launcher_whose_own_files_cannot_be_written_runs_the_processes(tmp_path, capfd):
    (tmp_path / "logs").write_text("a file in the place of a folder")
    command = spec.ProcessCommand(argv=(sys.executable, "-c", "print('trained')"), env={"RANK": "0"})
    assert processes.run([command], tmp_path / "logs", grace_s=1.0).code == 0
    said = capfd.readouterr()
    assert "process_0.txt cannot be written (" in said.err and "trained" in said.out + said.err


def raise_(error):
    raise error


def test_what_a_failing_disk_did_not_take_of_the_status_is_told_with_the_next_change(tmp_path, monkeypatch):
    file = tmp_path / "status.json"
    monkeypatch.setenv(status.VARIABLE, str(file))
    with monkeypatch.context() as patch:
        patch.setattr(status.os, "replace", lambda *_: raise_(OSError(5, "Input/output error")))
        status.tell(opened=True)
    status.tell(saved_step=10)
    assert status.read(file) == Status(opened=True, saved_step=10)
    reads, read_text = iter([5, 5]), Path.read_text

    def read(path, **named):
        if number := next(reads, 0):
            raise OSError(number, "Input/output error")
        return read_text(path, **named)

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(status, "_PAUSE_S", 0.0)
    assert status.read(file, limit_s=60.0) == Status(opened=True, saved_step=10)
