"""The scripts run from any folder, in a shell where nothing is activated: they find the checkout and its `.venv`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAUNCHED = "-m openpi_train"
# Lines of the older tools' guides, and what they print.
LINES = {
    "run_distributed.py --world-size 2 --dry-run -- debug --exp-name x": LAUNCHED,
    "run_distributed.py --nproc_per_node 2 --config config_distributed_example.yaml --dry_run": LAUNCHED,
    "main_train_ddp.py --world_size 2 --dry_run": LAUNCHED,
    "main.py --help": "python -m openpi_train posttrain",
    "train.py --help": "usage: python -m openpi_train",
    "serve_policy.py --help": "python -m openpi_train serve",
    "compute_norm_stats.py --help": "python -m openpi_train stats",
    "prepare_datasets.py --help": "python -m openpi_train posttrain",
    "merge_zarr.py --help": "data merge",
    "launch_multi_node.sh localhost 1 2 --dry-run -- debug --exp-name x": LAUNCHED,
    "launch_distributed_training.sh --config pi0/ript/config/distributed_train_pi0.yaml --gpus 2 --dry-run": LAUNCHED,
    "quick_distributed_test.sh --dry-run": LAUNCHED,
    "run_ddp_training.sh 2 --dry_run": LAUNCHED,
    "train_multi_gpu.sh six_tasks demo_clean 1200 0 2 --dry-run": LAUNCHED,
    "train.sh six_tasks demo_clean 1200 0 14 0 --dry-run": LAUNCHED,
    "train_six_tasks.sh demo_clean 1200 0 0 --dry-run": LAUNCHED,
    "launch_multi_node.sh --help": "NODE_RANK=1 ./scripts/launch_multi_node.sh",
    "train_multi_gpu.sh --help": "./scripts/train_multi_gpu.sh <task>",
    "train.sh --help": "./scripts/train.sh <task>",
    "train_six_tasks.sh --help": "./scripts/train_six_tasks.sh <setting>",
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A checkout in a folder with a space, that is installed nowhere; its .venv is this Python."""
    folder = tmp_path_factory.mktemp("my work") / "openpi train"
    folder.mkdir()
    for name in ("scripts", "configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "openpi_train").symlink_to(ROOT / "openpi_train")
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return folder


def write_plain_pythons(folder):
    """A folder with `python` and `python3` that lack our packages, as a system has them."""
    folder.mkdir(exist_ok=True)
    for name in ("python", "python3"):
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys._base_executable}" -S "$@"\n')  # pyright: ignore
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture
def plain_pythons(tmp_path):
    return write_plain_pythons(tmp_path / "bin")


def started(checkout, line, folder):
    """The script, or `-m openpi_train` in the checkout, in a shell that knows no Python but the system's."""
    script, *words = line.split()
    plain = write_plain_pythons(folder / "bin")
    is_module = script == "-m"
    program = "bash" if script.endswith(".sh") else str(plain / "python3")
    return subprocess.run(
        [program, script if is_module else str(checkout / "scripts" / script), *words],
        cwd=checkout if is_module else folder,
        env={"PATH": f"{plain}:/usr/bin:/bin", "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("line", LINES)
def test_a_script_needs_no_activated_environment_and_no_folder(checkout, tmp_path, line):
    done = started(checkout, line, tmp_path)
    assert done.returncode == 0 and LINES[line] in done.stdout, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_without_any_environment_it_says_what_makes_one(tmp_path):
    (tmp_path / "scripts").mkdir()
    for name in ("checkout.py", "main.py"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    (tmp_path / "openpi_train").symlink_to(ROOT / "openpi_train")
    (tmp_path / "Makefile").touch()
    for line in (
        "main.py --help",
        "-m openpi_train debug --exp-name x",
        f"{LAUNCHED} launch local --processes 2 -- debug --exp-name x",
        f"{LAUNCHED} launch slurm --gpus-per-node 1 -- debug --exp-name x",
        f"{LAUNCHED} launch ssh --hosts a --processes-per-node 1 -- debug --exp-name x",
    ):
        done = started(tmp_path, line, tmp_path)
        first, second = done.stderr.splitlines()
        assert done.returncode == 2 and "(jax, tyro)" in first and f"make -C {tmp_path} train" in second
    assert not (tmp_path / "slurm_scripts").exists()


@pytest.mark.parametrize(
    ("line", "expected"),
    {
        "-m openpi_train list": "pi0_bridge_traj ",
        f"{LAUNCHED} launch local --processes 1 --dry-run -- debug --exp-name x": f"python {LAUNCHED} debug",
    }.items(),
)
def test_the_command_line_finds_the_environment_of_its_checkout(checkout, tmp_path, line, expected):
    done = started(checkout, line, tmp_path)
    assert done.returncode == 0 and expected in done.stdout, done.stdout + done.stderr


def test_a_job_for_slurm_is_written_with_the_python_of_the_checkout(checkout, tmp_path):
    options = f"--no-check --gpus-per-node 1 --output-dir {tmp_path}/jobs"
    done = started(checkout, f"{LAUNCHED} launch slurm {options} -- debug --exp-name x", tmp_path)
    assert done.returncode == 0 and sys.executable in (tmp_path / "jobs" / "debug.sh").read_text(), done.stderr


def test_a_launcher_whose_processes_have_a_python_of_their_own_needs_none_here(tmp_path):
    (tmp_path / "openpi_train").symlink_to(ROOT / "openpi_train")
    assert "usage: python -m openpi_train" in started(tmp_path, f"{LAUNCHED} --help", tmp_path).stdout
    for options in (
        "slurm --dry-run --gpus-per-node 1 --container image",
        "ssh --dry-run --hosts a --python /b/python ",
    ):
        options += " --processes-per-node 1" if "ssh" in options else ""
        done = started(tmp_path, f"{LAUNCHED} launch {options} -- debug --exp-name x", tmp_path)
        assert done.returncode == 0 and "openpi_train debug" in done.stdout, done.stderr


def test_liberos_client_without_its_packages_has_its_help_and_names_them(tmp_path):
    done = subprocess.run(
        [sys._base_executable, "-S", ROOT / "scripts" / "evaluate_libero.py", "--help"],  # pyright: ignore
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "--suite" in done.stdout, done.stderr
    done = subprocess.run(
        [*done.args[:-1], "--suite", "libero_goal", "--out", tmp_path / "out.json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "No module named 'msgpack'" in done.stderr and "pip install numpy msgpack" in done.stderr


def test_every_script_is_tried():
    own = {"build_dist.py", "evaluate_libero.py", "checkout.py"}  # in environments of their own
    names = {file.name for file in (ROOT / "scripts").iterdir() if file.suffix in (".py", ".sh")}
    assert names - own == {line.split()[0] for line in LINES}


@pytest.mark.slow
def test_all_stores_of_the_data_folder_are_merged(checkout, tmp_path):
    fixture = ROOT / "tests" / "data" / "formats" / "zarr" / "fixtures" / "arms_14.zarr"
    for task in ("stack_bowls", "hanging_mug"):
        shutil.copytree(fixture, tmp_path / "data" / f"{task}-demo_clean-50.zarr")
    done = started(checkout, "merge_zarr.py", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "data" / "six_tasks.zarr").is_dir()
    os.rename(tmp_path / "data", tmp_path / "else")
    refused = started(checkout, "merge_zarr.py", tmp_path)
    assert refused.returncode == 2 and "no zarr stores in" in refused.stderr
