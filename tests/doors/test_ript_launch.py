"""The launcher's options of the RIPT trainers for pi0, as their guide has them."""

import shlex

import pytest
from launch.test_launchers import script

from openpi_train import faults
from openpi_train.doors.ript import ript_launch
from openpi_train.launch import launchers

CONFIG = "pi0/ript/config/distributed_train_pi0.yaml"
DEBUG = "pi0/ript/config/debug_distributed_train.yaml"
LAUNCHER = "./scripts/launch_distributed_training.sh"


@pytest.fixture
def gpus(tmp_path):
    """The device files of a machine with GPUs."""
    (tmp_path / "nvidia0").touch()
    return tmp_path


@pytest.fixture
def started(tmp_path, monkeypatch):
    """What `launch` was told, in a folder with the guide's configs."""
    monkeypatch.chdir(tmp_path)
    for name in (CONFIG, DEBUG):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    told = []
    monkeypatch.setattr(launchers, "main", lambda words: told.append(words) or 0)
    return told


@pytest.mark.parametrize(
    ("command", "same"),
    [
        (f"--config {CONFIG} --gpus 4", f"local --processes 4 -- ript --config {CONFIG}"),
        (f"-c {CONFIG}", f"local --processes 4 -- ript --config {CONFIG}"),
        (
            f"--config {CONFIG} --nodes 2 --gpus 4 --node-rank 1 --master-addr 192.168.1.100 --master-port 12355",
            "manual --node-rank 1 --num-nodes 2 --processes-per-node 4 --master-addr 192.168.1.100 --master-port 12355 "
            f"-- ript --config {CONFIG}",
        ),
        (
            f"-c {CONFIG} -n 2 -g 1 -r 0 -m host --log-dir l",
            "manual --node-rank 0 --num-nodes 2 --processes-per-node 1 --master-addr host --master-port 12355 "
            f"--log-dir l -- ript --config {CONFIG}",
        ),
        (
            f"--config {CONFIG} --gpus 1 --dry-run -- --seed 1",
            f"local --processes 1 --dry-run -- ript --config {CONFIG} --seed 1",
        ),
        ("--debug --gpus 2", f"local --processes 2 -- ript --config {DEBUG}"),
    ],
)
def test_a_command_of_the_guide_is_one_of_launch(command, same, started, gpus, capsys):
    assert ript_launch.main(shlex.split(command), devices=gpus) == 0
    assert started == [shlex.split(same)] and not capsys.readouterr().err


def test_without_gpus_a_process_has_a_cpu_device_and_that_is_told(started, tmp_path, capsys):
    (tmp_path / "null").touch()
    assert ript_launch.main(["--config", CONFIG, "--gpus", "2"], devices=tmp_path) == 0
    assert started == [shlex.split(f"local --processes 2 --devices-per-process 1 -- ript --config {CONFIG}")]
    assert "there is no GPU here; --gpus 2: processes with a CPU device each" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["nvidia7", "kfd", "dxg", "accel0", "vfio/3"])
def test_accelerators_have_device_files(file, tmp_path):
    (tmp_path / "nvidiactl").touch()
    assert not ript_launch.has_accelerator(tmp_path)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    assert ript_launch.has_accelerator(tmp_path)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("--gpus 2", "--config FILE is missing"),
        ("--config nowhere.yaml", "there is no config nowhere.yaml"),
        (f"--config {CONFIG} --nodes 2", "2 hosts need --master-addr, the address of the first"),
    ],
)
def test_what_is_missing_is_said(command, message, started, gpus, capsys):
    assert ript_launch.main(shlex.split(command), devices=gpus) == faults.USAGE
    assert f"launch_distributed_training.sh: {message}" in capsys.readouterr().err and not started


def test_the_script_starts_these_processes():
    done = script(LAUNCHER, "--config", CONFIG, "--gpus", "2", "--dry-run", "--", "--seed", "1")
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and [line.split()[0] for line in lines] == ["RANK=0", "RANK=1"]
    assert all(line.endswith(f"-m openpi_train ript --config {CONFIG} --seed 1") for line in lines)


def test_the_quick_test_imitates_and_then_starts_two_processes():
    done = script("./scripts/quick_distributed_test.sh", "--dry-run")
    first, *lines = done.stdout.splitlines()
    assert done.returncode == 0 and " -m openpi_train tabletop_few --exp-name quick_distributed_test " in first
    assert [line.split()[0] for line in lines] == ["RANK=0", "RANK=1"]
    assert all(line.endswith("scripts/quick_distributed_test.yaml") for line in lines)
    again = script("./scripts/quick_distributed_test.sh", "--gpus", "2", "--dry-run")
    assert [line.split()[0] for line in again.stdout.splitlines()] == [first.split()[0], "RANK=0", "RANK=1"]


def test_the_quick_test_tells_its_options_without_imitating():
    done = script("./scripts/quick_distributed_test.sh", "--help")
    assert done.returncode == 0 and "--gpus" in done.stdout and "tabletop_few" not in done.stdout
