"""Diffusion policies through the command line: one command per store, the same run on 1 and 2 processes and resumed."""

import json
from pathlib import Path

import numpy as np
import pytest
from command import check, copy_without, losses, openpi_train, train

from openpi_train.checkpoints.checkpoint_formats import open_checkpoint

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
STORES = Path(__file__).resolve().parents[1] / "data" / "formats" / "zarr" / "fixtures"
SMALL = "--model.encoder-widths 16 --model.unet.widths 16 --model.diffusion-step-embed-dim 16 --batch-size 4".split()
SMALL += "--log-interval 1 --eval.num-rows 4 --eval.num-train-rows 4 --eval.num-sample-steps 2 --num-workers 0".split()
CUT = "--sharding.strategy zero3 --sharding.min-shard-mib 0 --fsdp-devices 2".split()
STEPS = 4
RUN = ("robot_dp_tiny", "--dataset", STORES / "arms_14.zarr", *SMALL, *CUT)
RUN += ("--save-interval", "2", "--lr-schedule.kind", "constant", "--lr-schedule.warmup-steps", "0")
LENGTH = ("--num-train-steps", str(STEPS))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    # XLA for CPUs shares a convolution's sums out over as many threads as a process has devices, or cores if there are
    # more; here as many in each (docs/understand/numerics.md).
    return {"OPENPI_TRAIN_HOME": str(tmp_path_factory.mktemp("home")), "NPROC": "2"}


@pytest.fixture(scope="module")
def straight(tmp_path_factory, home):
    base = tmp_path_factory.mktemp("straight")
    train(base, *RUN, *LENGTH, devices=2, **home)
    return base


def directory(base, dims=14):
    return base / "runs" / f"robot_dp_tiny_{dims}" / "x"


def lines(base, name="metrics.jsonl"):
    return [json.loads(line) for line in (directory(base) / name).read_text().splitlines()]


def evaluations(base):
    names = ("val/loss", "val/loss_ema", "val/action_mse_ema", "train/action_mse_ema")
    return {line["step"]: [line[name] for name in names] for line in lines(base) if "val/loss" in line}


def test_a_run_that_stopped_half_way_goes_on_as_if_nothing_had_happened(tmp_path, straight, home):
    copy_without(straight, tmp_path, STEPS, "robot_dp_tiny_14")
    done = train(tmp_path, *RUN, *LENGTH, "--resume", devices=2, **home)
    assert f"continuing from step 2 of {STEPS}" in done.stderr
    assert losses(tmp_path, "robot_dp_tiny_14") == losses(straight, "robot_dp_tiny_14")
    assert evaluations(tmp_path)[STEPS] == evaluations(straight)[STEPS]
    averages = [open_checkpoint(directory(base) / str(STEPS)).params for base in (tmp_path, straight)]
    assert averages[0].keys() == averages[1].keys()
    for name, leaf in averages[0].items():
        np.testing.assert_array_equal(leaf.whole(), averages[1][name].whole(), err_msg=name)


def test_two_processes_give_the_bits_of_one(tmp_path, straight, home):
    done = train(tmp_path, *RUN, *LENGTH, processes=2, **home)
    # The run is named after the experiment that the store chose, and one process says so.
    assert done.stdout.count("the dataset has 14 action dims, so this is robot_dp_tiny_14") == 1
    assert losses(tmp_path, "robot_dp_tiny_14") == losses(straight, "robot_dp_tiny_14")
    assert evaluations(tmp_path) == evaluations(straight)


def test_the_devices_hold_what_the_plan_said(straight):
    plan = json.loads((directory(straight) / "plan.json").read_text())
    assert plan["strategy"] == "zero3"
    assert plan["compiled_bytes_per_device"]["state"] == pytest.approx(plan["bytes_per_device"]["state"], rel=0.02)


def test_logs_json_has_diffusion_policys_names(straight):
    ours, theirs = lines(straight), lines(straight, "logs.json.txt")
    trained = [line for line in theirs if "train_loss" in line]
    assert [(line["global_step"], line["epoch"]) for line in trained] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert [line["train_loss"] for line in trained] == [line["loss"] for line in ours if "loss" in line]
    (last,) = [line for line in theirs if "val_loss" in line and line["global_step"] == STEPS - 1]
    assert [last["val_loss"], last["val_action_mse_error"], last["train_action_mse_error"]] == evaluations(straight)[
        STEPS
    ][1:]


@pytest.mark.parametrize("dims", [10, 16])
def test_one_command_trains_on_a_store_of_any_dims(tmp_path, home, dims):
    """On one of 14 dims all the others have trained."""
    short = (
        "--num-epochs",
        "1",
        "--lr-schedule.warmup-steps",
        "1",
        "--batch-size",
        "16",
        "--data.validation-fraction",
        "0",
        "--model.denoiser",
        "mlp",
        "--model.mlp.width",
        "32",
    )
    done = train(tmp_path, RUN[0], "--dataset", STORES / f"arms_{dims}.zarr", *SMALL, *short, **home)
    assert "1 epochs of 27 samples, 16 at a time: 2 steps" in done.stderr
    assert done.stderr.count(f"the dataset has {dims} action dims, so this is robot_dp_tiny_{dims}") == 1
    assert set(losses(tmp_path, f"robot_dp_tiny_{dims}")) == {1, 2}


def test_dims_that_no_experiment_is_for_are_an_error_with_what_is_known(home):
    done = openpi_train("robot_dp", "--exp-name", "x", "--dataset", STORES / "push_t.zarr", **home)
    check(done, 3, "has [2] per step there", "Known: 10, 14, 16 dims")


def test_a_length_in_epochs_and_in_steps_is_refused(home):
    both = ("--num-epochs", "1", "--num-train-steps", "2")
    done = openpi_train(RUN[0], "--exp-name", "x", "--dataset", STORES / "arms_14.zarr", *both, **home)
    check(done, 2, "--num-train-steps and --num-epochs both set the length of the run")
