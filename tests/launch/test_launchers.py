import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from openpi_train.launch import launchers

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENT = ["--", "pi0_bridge_traj_tiny", "--exp-name", "x"]


def script(*argv: str, **environment: str) -> subprocess.CompletedProcess:
    """Run one of the scripts in an environment that says nothing of any cluster but `environment`."""
    clean = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "NODE_RANK", "HOSTS")
    }
    paths = {"PYTHONPATH": str(ROOT), "PYTHON": sys.executable}
    return subprocess.run(
        argv, cwd=ROOT, env={**clean, **paths, **environment}, capture_output=True, text=True, timeout=240, check=False
    )


def run_distributed(*argv: str, **environment: str) -> subprocess.CompletedProcess:
    return script(sys.executable, "scripts/run_distributed.py", *argv, **environment)


def test_dry_run_prints_a_line_per_process(capsys):
    options = ["local", "--processes", "2", "--devices-per-process", "2", "--port", "1234", "--dry-run"]
    assert launchers.main([*options, *EXPERIMENT]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"RANK={rank} WORLD_SIZE=2 LOCAL_RANK={rank} LOCAL_WORLD_SIZE=2 NODE_RANK=0 MASTER_ADDR=127.0.0.1 "
        "MASTER_PORT=1234 JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=2 "
        f"{sys.executable} -m openpi_train pi0_bridge_traj_tiny --exp-name x"
        for rank in range(2)
    ]


def test_the_port_is_that_of_master_port_unless_it_is_a_running_processs(capsys, monkeypatch):
    def port(*options):
        assert launchers.main(["local", "--processes", "1", *options, "--dry-run", *EXPERIMENT]) == 0
        return capsys.readouterr().out.partition("MASTER_PORT=")[2].split()[0]

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("MASTER_PORT", "12345")
    assert (port(), port("--port", "1234")) == ("12345", "1234")
    monkeypatch.setenv("RANK", "0")
    assert port() != "12345"
    monkeypatch.delenv("RANK")
    monkeypatch.setenv("MASTER_PORT", "x")
    assert launchers.main(["local", "--processes", "1", "--dry-run", *EXPERIMENT]) == 2
    assert "MASTER_PORT is 'x'; it must be a port" in capsys.readouterr().err


def test_the_help_of_run_distributed_has_the_options_of_both_of_its_forms():
    told = run_distributed("--help").stdout
    both = ("--mode", "--world-size", "--nproc_per_node", "--config", "--algorithm", "--use_torchrun", "--nnodes")
    assert all(option in told for option in both)


def test_manual_starts_its_share_and_prints_the_lines_of_the_other_hosts(capsys):
    options = ["manual", "--num-nodes", "3", "--master-addr", "10.0.0.1", "--gpus-per-node", "2", "--dry-run"]
    assert launchers.main([*options, "--node-rank", "1", *EXPERIMENT]) == 0
    first, last, *own = capsys.readouterr().out.splitlines()
    prefix = "python -m openpi_train launch manual"
    assert first.startswith(f"on host 0: {prefix} --node-rank 0 ") and last.startswith(
        f"on host 2: {prefix} --node-rank 2"
    )
    assert [line.split()[0] for line in own] == ["RANK=2", "RANK=3"]

    words = shlex.split(last.removeprefix(f"on host 2: {prefix}"))
    assert launchers.main(["manual", "--dry-run", *words]) == 0
    again = capsys.readouterr().out.splitlines()
    assert first in again
    assert [line.split()[0] for line in again[2:]] == ["RANK=4", "RANK=5"]


def test_the_line_for_another_host_says_all_that_this_one_was_told(capsys):
    """What host 0 prints for host 1, read by a shell there, starts host 1's share of the same run."""
    options = "--num-nodes 2 --master-addr node1 --master-port 1234 --processes-per-node 2 --devices-per-process 3"
    words = ["manual", *options.split(), "--job-token", "a $w", "--dry-run"]
    run = ["--", "debug", "--exp-name", "it's a $HOME"]
    assert launchers.main([*words, "--node-rank", "0", *run]) == 0
    told, *own = capsys.readouterr().out.splitlines()
    assert [shlex.split(line)[-1] for line in own] == ["it's a $HOME"] * 2
    assert all("OPENPI_TRAIN_JOB_TOKEN='a $w'" in line and "MASTER_PORT=1234" in line for line in own)

    python, minus_m, program, verb, *there = shlex.split(told.removeprefix("on host 1: "))
    assert (python, minus_m, program, verb) == ("python", "-m", "openpi_train", "launch")
    assert launchers.main([there[0], "--dry-run", *there[1:]]) == 0
    _, *others = capsys.readouterr().out.splitlines()
    for line, other in zip(own, others, strict=True):
        ours, theirs = (dict(word.split("=", 1) for word in shlex.split(one) if "=" in word) for one in (line, other))
        moved = {name: str(int(ours[name]) + step) for name, step in {"RANK": 2, "NODE_RANK": 1}.items()}
        assert theirs == {**ours, **moved}
        assert shlex.split(other)[-3:] == ["debug", "--exp-name", "it's a $HOME"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["local", "--processes", "2"], "put the experiment after --"),
        (["local", "--processes", "0", *EXPERIMENT], "there must be one"),
        (
            [
                "manual",
                "--node-rank",
                "2",
                "--num-nodes",
                "2",
                "--master-addr",
                "a",
                "--gpus-per-node",
                "1",
                *EXPERIMENT,
            ],
            "--node-rank 2 is not from 0 to 1",
        ),
        (
            ["manual", *"--node-rank 0 --num-nodes 2 --master-addr".split(), "", "--gpus-per-node", "1", *EXPERIMENT],
            "empty",
        ),
    ],
)
def test_a_launch_that_cannot_be_is_refused_with_code_2(argv, message, capsys):
    assert launchers.main(argv) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "local --processes 2 --grace-s -1",
        "local --processes 2 --grace-s nan",
        "local --processes 2 --devices-per-process 0",
        "manual --node-rank 0 --num-nodes 2 --master-addr a --gpus-per-node 0",
        "ssh --hosts a,b --processes-per-node 0",
    ],
)
def test_a_number_that_cannot_be_is_refused_by_its_option(words, capsys):
    with pytest.raises(SystemExit) as ended:
        launchers.main([*words.split(), *EXPERIMENT])
    assert ended.value.code == 2
    assert f"argument {words.split()[-2]}: {words.split()[-1]!r} is not a number of" in capsys.readouterr().err


def test_a_forgotten_separator_is_refused(capsys):
    assert launchers.main(["local", "--processes", "2", "pi0_bridge_traj_tiny"]) == 2
    assert "no such option: pi0_bridge_traj_tiny; what the processes are to run comes after --" in (
        capsys.readouterr().err
    )


def test_launching_never_imports_jax():
    code = (
        "import sys, openpi_train.launch.launchers; print([name for name in ('jax', 'numpy') if name in sys.modules])"
    )
    assert script(sys.executable, "-c", code).stdout == "[]\n"


def test_run_distributed_starts_what_launch_local_starts(capsys):
    options = ["--world-size", "4", "--gpus-per-node", "4", "--master-port", "1234", "--dry-run"]
    by_script = run_distributed("--mode", "manual", *options, *EXPERIMENT)
    assert by_script.returncode == 0, by_script.stderr
    assert launchers.main(["local", "--processes", "4", "--port", "1234", "--dry-run", *EXPERIMENT]) == 0
    assert by_script.stdout == capsys.readouterr().out


def test_run_distributed_names_the_page_for_lines_of_other_tools():
    done = run_distributed("--nproc_per_nod", "4", "train.py")
    assert done.returncode == 2 and "unrecognized arguments: --nproc_per_nod 4 train.py" in done.stderr
    assert done.stderr.endswith("the launch lines of other tools, and what they are here: docs/howto/hosts.md\n")
    assert (ROOT / "docs" / "howto" / "hosts.md").is_file()
    assert "docs/howto/hosts.md" in run_distributed("--mode", "manual").stderr
    of_the_other_form = run_distributed("--nproc_per_node", "4", "train.py").stderr
    assert of_the_other_form.endswith("--config\n" + done.stderr.splitlines()[-1] + "\n")


def test_run_distributed_starts_what_launch_manual_starts(capsys):
    options = ["--world-size", "8", "--gpus-per-node", "4", "--node-rank", "1", "--master-addr", "10.0.0.1"]
    by_script = run_distributed(*options, "--dry-run", *EXPERIMENT)
    words = ["manual", "--node-rank", "1", "--num-nodes", "2", "--gpus-per-node", "4", "--master-addr", "10.0.0.1"]
    assert launchers.main([*words, "--dry-run", *EXPERIMENT]) == 0
    assert by_script.stdout == capsys.readouterr().out


def test_run_distributed_with_a_rank_is_that_one_process():
    # The line of the multi-host guide of the older tool, with its environment.
    environment = {"MASTER_ADDR": "192.168.1.100", "MASTER_PORT": "29500", "WORLD_SIZE": "8"}
    options = ["--mode", "manual", "--rank", "6", "--world-size", "8", "--local-rank", "2", "--node-rank", "1"]
    address = ["--master-addr", "192.168.1.100", "--master-port", "29500"]
    result = run_distributed(*options, *address, "--dry-run", *EXPERIMENT, **environment)
    assert result.stdout == (
        "RANK=6 WORLD_SIZE=8 LOCAL_RANK=2 NODE_RANK=1 MASTER_ADDR=192.168.1.100 MASTER_PORT=29500 "
        f"{sys.executable} -m openpi_train pi0_bridge_traj_tiny --exp-name x\n"
    )


def test_run_distributed_with_a_rank_knows_its_number_on_the_host():
    options = ["--rank", "6", "--world-size", "8", "--gpus-per-node", "4", "--node-rank", "1"]
    result = run_distributed(*options, "--master-addr", "node1", "--dry-run", *EXPERIMENT)
    assert result.stdout.startswith(
        "RANK=6 WORLD_SIZE=8 LOCAL_RANK=2 LOCAL_WORLD_SIZE=4 NODE_RANK=1 MASTER_ADDR=node1 "
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "say how many processes the run has"),
        (["--world-size", "6", "--gpus-per-node", "4"], "is not a multiple of --gpus-per-node"),
        (["--world-size", "8", "--gpus-per-node", "4"], "2 hosts need --master-addr"),
        (["--rank", "0"], "--rank needs --world-size"),
    ],
)
def test_run_distributed_refuses_what_cannot_be(options, message):
    result = run_distributed(*options, *EXPERIMENT)
    assert result.returncode == 2 and message in result.stderr


def test_launch_multi_node_starts_what_launch_manual_starts(capsys):
    by_script = script(
        "scripts/launch_multi_node.sh",
        *("192.168.1.100", "2", "4", "--dry-run", *EXPERIMENT),
        NODE_RANK="1",
        MASTER_PORT="1234",
    )
    assert by_script.returncode == 0, by_script.stderr
    options = ["--node-rank", "1", "--num-nodes", "2", "--processes-per-node", "4", "--master-addr", "192.168.1.100"]
    options += ["--master-port", "1234"]
    assert launchers.main(["manual", *options, "--dry-run", *EXPERIMENT]) == 0
    assert by_script.stdout == capsys.readouterr().out


def test_launch_multi_node_with_a_list_of_hosts_starts_what_launch_ssh_starts(capsys):
    words = ["192.168.1.100", "2", "4", "--dry-run", *EXPERIMENT]
    by_script = script("scripts/launch_multi_node.sh", *words, HOSTS="node1,ann@node2")
    assert by_script.returncode == 0, by_script.stderr
    options = ["--hosts", "node1,ann@node2", "--processes-per-node", "4", "--master-addr", "192.168.1.100"]
    assert launchers.main(["ssh", *options, "--workdir", str(ROOT), "--dry-run", *EXPERIMENT]) == 0
    assert by_script.stdout == capsys.readouterr().out
    refused = script("scripts/launch_multi_node.sh", *words, HOSTS="node1")
    assert refused.returncode == 2 and "HOSTS names 1 hosts (node1), not 2" in refused.stderr


def test_launch_multi_node_knows_the_master_and_resumes_by_default():
    result = script("scripts/launch_multi_node.sh", "127.0.0.1", "2", "4", "--dry-run")
    assert "NODE_RANK=0" in result.stdout
    assert "pi0_bridge_traj --exp-name multi_node_training --resume" in result.stdout
    assert "--overwrite" not in result.stdout


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["10.255.255.1", "2"], "three arguments are needed"),
        (["10.255.255.1", "2", "4"], "say which it is: NODE_RANK=1"),
        (["10.255.255.1", "2", "4", "pi0_bridge_traj"], "put -- before the experiment"),
    ],
)
def test_launch_multi_node_explains_what_is_missing(argv, message):
    result = script("scripts/launch_multi_node.sh", *argv)
    assert result.returncode == 2 and message in result.stderr


def test_train_multi_gpu_starts_what_launch_local_starts(capsys, tmp_path):
    (tmp_path / "put-away.zarr").mkdir()
    words = ["put_away", "demo", "50", "3", "2", "0,3", "--dry-run", "--", "--batch-size", "8"]
    by_script = script("scripts/train_multi_gpu.sh", *words, DATA=str(tmp_path))
    assert by_script.returncode == 0, by_script.stderr
    run = ["robot_dp", "--exp-name", "put_away-demo-50_seed3", "--seed", "3", "--dataset", f"{tmp_path}/put-away.zarr"]
    run += ["--resume", "--no-keep-effective-batch-size", "--logs-json"]  # there, each GPU takes the batch size
    assert "each of the 2 GPUs takes the batch size" in by_script.stderr
    assert launchers.main(["local", "--processes", "2", "--dry-run", "--", *run, "--batch-size", "8"]) == 0
    ours, theirs = (re.sub(r"MASTER_PORT=\d+", "", out) for out in (by_script.stdout, capsys.readouterr().out))
    assert ours == theirs
    refused = script("scripts/train_multi_gpu.sh", *words[:4], "3", "0,3")
    assert refused.returncode == 2 and "3 GPUs, but the numbers 0,3" in refused.stderr


@pytest.mark.parametrize("gpus", ["2", "4", "8"])
def test_train_multi_gpu_takes_the_arguments_of_robotwins_guide(gpus, tmp_path):
    (tmp_path / "six_tasks.zarr").mkdir()
    words = ("six_tasks", "demo_clean", "1200", "0", gpus)
    done = script("scripts/train_multi_gpu.sh", *words, "--dry-run", DATA=str(tmp_path))
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == int(gpus), done.stderr
    run = f"robot_dp --exp-name six_tasks-demo_clean-1200_seed0 --seed 0 --dataset {tmp_path}/six_tasks.zarr --resume"
    assert all(line.endswith(f"-m openpi_train {run} --no-keep-effective-batch-size --logs-json") for line in lines)


@pytest.mark.parametrize(
    ("line", "run"),
    [
        ("train.sh put_away demo 50 3 14 1", "robot_dp_14 --exp-name put_away-demo-50_seed3"),
        # Its store says the dims, as the guide has it.
        ("train.sh six_tasks demo 50 3 14 1", "robot_dp --exp-name six_tasks-demo-50_seed3"),
        ("train_six_tasks.sh demo 50 3 1", "robot_dp --exp-name six_tasks-demo-50_seed3"),
    ],
)
def test_the_scripts_for_one_gpu_are_those_for_several_with_one(line, run, tmp_path):
    name, *words = line.split()
    done = script(f"scripts/{name}", *words, "--dry-run", "--", "--batch-size", "8", DATA=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "WORLD_SIZE=1 " in done.stdout and "as there" not in done.stderr
    assert f"-m openpi_train {run} --seed 3 --dataset {tmp_path}/" in done.stdout
    assert done.stdout.rstrip().endswith("--resume --no-keep-effective-batch-size --logs-json --batch-size 8")
    refused = script(f"scripts/{name}", *words[:3])
    assert refused.returncode == 2 and "arguments are needed, 3 given" in refused.stderr


@pytest.mark.parametrize(("word", "meant"), [("--process", "--processes"), ("--prot", "--port")])
def test_options_are_not_abbreviated(word, meant, capsys):
    assert launchers.main(["local", "--processes", "2", word, "4", *EXPERIMENT]) == 2
    told = capsys.readouterr().err
    assert f"no such option: {word} 4 (did you mean {meant}?)" in told


def test_no_parser_takes_abbreviations():
    files = [file for folder in ("openpi_train", "scripts", "benchmarks") for file in (ROOT / folder).rglob("*.py")]
    kinds = ("ArgumentParser", "add_parser")
    found = []
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in kinds:
                settings = {word.arg: word.value for word in node.keywords}
                if not isinstance(value := settings.get("allow_abbrev"), ast.Constant) or value.value is not False:
                    found.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert not found


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("ssh --processes-per-node 2", "one of the arguments --hosts --hosts-file is required"),
        ("ssh --hosts a", "one of the arguments --gpus-per-node --processes-per-node is required"),
        ("slurm --nodes two --gpus-per-node 4", "argument --nodes/--num-nodes: invalid int value: 'two'"),
        ("manual --node-rank 1 --gpus-per-node 4", "the following arguments are required: --num-nodes, --master-addr"),
        ("local --processes", "argument --processes: expected one argument"),
    ],
)
def test_a_forgotten_option_is_told_in_two_lines(line, what, capsys):
    with pytest.raises(SystemExit, match="2"):
        launchers.main([*line.split(), "--", "debug"])
    first, second = capsys.readouterr().err.splitlines()
    how = f"python -m openpi_train launch {line.split()[0]}"
    assert first == f"{how}: {what}" and second == f"`{how} --help` explains the options"
