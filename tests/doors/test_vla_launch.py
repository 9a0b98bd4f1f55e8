"""Every command of the PaliGemma VLA's guide, by its scripts, up to the run that each process would start."""

import dataclasses
import shlex

import pytest
from launch.test_launchers import script
from vla_project import write_vla_project

from openpi_train import cli, train_verbs
from openpi_train.doors.door_requests import VlaRequest
from openpi_train.doors.vla import vla_launch
from openpi_train.elastic import adapt
from openpi_train.launch import launchers

CONFIG = "configs/vla_config.yaml"
BEST = "experiments/paligemma_vla_finetune_20241201_120000/checkpoints/best_model.pth"


def test_the_help_names_every_option_of_the_run():
    fields = {field.name for field in dataclasses.fields(VlaRequest)} - {"config"}
    assert {f"--{name}" for name in fields} == set(vla_launch.OF_THE_RUN)
    told = script("./scripts/train_multi_gpu.sh", "--help").stdout
    assert "<task> <setting>" in told and all(option in told for option in ("--world_size", *vla_launch.OF_THE_RUN))


@pytest.fixture
def started(tmp_path, monkeypatch):
    """What `launch` was told, and the experiments of the processes, in the trainer's folder."""
    monkeypatch.chdir(write_vla_project(tmp_path))
    told, runs = [], []
    monkeypatch.setattr(launchers, "main", lambda words: told.append(words) or 0)
    monkeypatch.setattr(train_verbs, "_run", lambda experiment, process: runs.append(experiment) or 0)
    return told, runs


# The command, what is launched, and of the run: its name, rows and epochs on so many devices, where it goes on.
GUIDE = [
    (
        f"--config_path {CONFIG} --world_size 4 --experiment_name paligemma_vla_multi_gpu --keep_effective_batch_size "
        "--use_wandb",
        f"local --processes 4 -- vla --config {CONFIG} --experiment_name paligemma_vla_multi_gpu "
        "--keep_effective_batch_size --use_wandb",
        (4, "paligemma_vla_multi_gpu", 8, 10, None),
    ),
    (
        f"--config_path {CONFIG} --world_size 4 --resume_checkpoint {BEST} --keep_effective_batch_size",
        f"local --processes 4 -- vla --config {CONFIG} --resume_checkpoint {BEST} --keep_effective_batch_size",
        (4, "paligemma_vla_finetune", 8, 10, "best"),
    ),
    (
        "--batch_size 16 --world_size 4",
        f"local --processes 4 -- vla --config {CONFIG} --batch_size 16",
        (4, "paligemma_vla_finetune", 64, 10, None),
    ),
    (
        "--batch_size 4 --world_size 4 --keep_effective_batch_size",
        f"local --processes 4 -- vla --config {CONFIG} --batch_size 4 --keep_effective_batch_size",
        (4, "paligemma_vla_finetune", 4, 10, None),
    ),
    (
        "--world_size 2",
        f"local --processes 2 -- vla --config {CONFIG}",
        (2, "paligemma_vla_finetune", 16, 10, None),
    ),
    (
        "--port 12356",
        f"local --processes 1 --port 12356 -- vla --config {CONFIG}",
        (2, "paligemma_vla_finetune", 16, 10, None),
    ),
    (
        "--batch_size 2",
        f"local --processes 1 -- vla --config {CONFIG} --batch_size 2",
        (2, "paligemma_vla_finetune", 4, 10, None),
    ),
    (
        "--resume_checkpoint path/to/single_gpu_checkpoint.pth --world_size 4",
        f"local --processes 4 -- vla --config {CONFIG} --resume_checkpoint path/to/single_gpu_checkpoint.pth",
        (4, "paligemma_vla_finetune", 32, 10, "path/to/single_gpu_checkpoint.pth"),
    ),
]


@pytest.mark.parametrize(("command", "same", "run"), GUIDE, ids=[command for command, _, _ in GUIDE])
def test_a_command_of_the_guide_is_one_of_launch_and_trains_as_there(command, same, run, started):
    told, runs = started
    assert vla_launch.main(shlex.split(command)) == 0
    assert told == [shlex.split(same)]
    assert cli.run(told[0][told[0].index("--") + 1 :]) == 0
    num_devices, name, rows, epochs, point = run
    fitted, _ = adapt(runs[0], num_devices, None)
    fitted.check(num_devices)
    assert (fitted.exp_name, fitted.batch_size, fitted.num_epochs, fitted.resume_from) == (name, rows, epochs, point)


def test_flags_of_the_launcher_and_of_the_experiment(started):
    told, _ = started
    words = "--config c.yaml --world-size 2 --devices_per_process 1 --log_dir l --dry-run --grad-accum 2 -- --seed 3"
    assert vla_launch.main(shlex.split(words)) == 0
    same = "local --processes 2 --devices-per-process 1 --log-dir l --dry-run -- vla --config c.yaml --grad-accum 2"
    assert told == [shlex.split(f"{same} --seed 3")]


@pytest.mark.parametrize(
    ("line", "processes", "vla"),
    [
        ("train_multi_gpu.sh --dry-run", 1, f"--config {CONFIG}"),
        ("train_multi_gpu.sh 2 --dry-run", 2, f"--config {CONFIG}"),
        (
            f"train_multi_gpu.sh 4 {CONFIG} my_experiment --dry-run",
            4,
            f"--config {CONFIG} --experiment_name my_experiment",
        ),
        (
            f"run_ddp_training.sh 2 {CONFIG} my_exp --batch_size 4 --epochs 20 --dry-run",
            2,
            f"--config {CONFIG} --experiment_name my_exp --batch_size 4 --epochs 20",
        ),
    ],
)
def test_the_scripts_tell_whose_arguments_they_are_given(line, processes, vla):
    name, *words = line.split()
    done = script(f"scripts/{name}", *words)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == processes and all(one.endswith(f" -m openpi_train vla {vla}") for one in lines)


def test_other_arguments_are_explained():
    refused = script("scripts/run_ddp_training.sh", "configs/vla_config.yaml")
    assert refused.returncode == 2 and "the number of GPUs comes first" in refused.stderr
    refused = script("scripts/train_multi_gpu.sh", "six_tasks", "demo_clean")
    assert refused.returncode == 2 and "five arguments are needed, 2 given" in refused.stderr
    assert "[GPUs] [config] [experiment name]" in refused.stderr
