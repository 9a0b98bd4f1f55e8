"""The launcher's options of the PyTorch post-training tool, as its guide has them."""

import shlex

import pytest
from launch.test_launchers import run_distributed

from openpi_train.doors.posttraining import posttraining_launch
from openpi_train.launch import launchers
from openpi_train.launch.spec import LaunchError

HOSTS = "--nproc_per_node 4 --nnodes 2 --node_rank 1 --master_addr 192.168.1.100 --master_port 29500"


@pytest.fixture
def config(tmp_path, monkeypatch):
    """The config that the commands name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").touch()


@pytest.mark.parametrize(
    ("command", "same"),
    [
        (
            "--nproc_per_node 4 --config c.yaml --algorithm sft",
            "local --processes 4 -- posttrain --config c.yaml --mode train --algorithm sft",
        ),
        (
            "--use_torchrun --nproc_per_node 4 --config c.yaml",
            "local --processes 4 -- posttrain --config c.yaml --mode train",
        ),
        (
            "--nproc-per-node 4 --master_port 29501 --backend gloo --config c.yaml",
            "local --processes 4 --port 29501 -- posttrain --config c.yaml --mode train",
        ),
        (
            "--config c.yaml --algorithm dpo",
            "local --processes 1 -- posttrain --config c.yaml --mode train --algorithm dpo",
        ),
        (
            f"{HOSTS} --config c.yaml",
            "manual --node-rank 1 --num-nodes 2 --processes-per-node 4 --master-addr 192.168.1.100 --master-port 29500 "
            "-- posttrain --config c.yaml --mode train",
        ),
        (
            "--config c.yaml --nnodes 2 --master_addr a --extra_args '--output_dir o --batch-size 8' --log_dir l",
            "manual --node-rank 0 --num-nodes 2 --processes-per-node 1 --master-addr a --master-port 29500 --log-dir l "
            "-- posttrain --config c.yaml --mode train --output_dir o --batch-size 8",
        ),
        (
            "--config c.yaml --experiment_name d1 --output-dir o --resume_from_checkpoint o/d1/checkpoints/latest",
            "local --processes 1 -- posttrain --config c.yaml --mode train --output_dir o --experiment_name d1 "
            "--resume_from_checkpoint o/d1/checkpoints/latest",
        ),
        (
            "--nproc_per_node 2 --devices_per_process 3 --config c.yaml --dry_run",
            "local --processes 2 --devices-per-process 3 --dry-run -- posttrain --config c.yaml --mode train",
        ),
    ],
)
def test_a_command_of_the_guide_is_one_of_launch(command, same, monkeypatch, config):
    started = []
    monkeypatch.setattr(launchers, "main", lambda words: started.append(words) or 0)
    options, arguments = launchers.split_arguments(shlex.split(command))
    assert posttraining_launch.is_meant(options)
    assert posttraining_launch.main(options, arguments) == 0
    assert started == [shlex.split(same)]


def test_arguments_after_two_dashes_are_passed_on(monkeypatch, config):
    started = []
    monkeypatch.setattr(launchers, "main", lambda words: started.append(words) or 0)
    assert posttraining_launch.main(["--config=c.yaml"], ["--seed", "1"]) == 0
    assert started[0][-2:] == ["--seed", "1"]
    assert posttraining_launch.is_meant(["--config=c.yaml"])
    assert not posttraining_launch.is_meant(["--mode", "manual", "--rank", "1"])


def test_a_config_that_is_not_there_is_told_once_before_any_process_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LaunchError, match=r"there is no config c\.yaml \(looked in"):
        posttraining_launch.main(["--config", "c.yaml", "--nproc_per_node", "4"])


def test_several_hosts_need_the_address_of_the_first():
    with pytest.raises(LaunchError, match="2 hosts need --master_addr"):
        posttraining_launch.main(["--config", "c.yaml", "--nnodes", "2"])


def test_the_script_starts_these_processes():
    done = run_distributed("--nproc_per_node", "2", "--config", "c.yaml", "--algorithm", "sft", "--dry-run")
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and [line.split()[0] for line in lines] == ["RANK=0", "RANK=1"]
    assert all(
        line.endswith("-m openpi_train posttrain --config c.yaml --mode train --algorithm sft") for line in lines
    )
    refused = run_distributed("--nnodes", "2", "--config", "c.yaml")
    assert refused.returncode == 2 and "run_distributed: 2 hosts need --master_addr" in refused.stderr
