"""Runs on the arithmetic task through the real command line: each kind starts, from the weights of the one before."""

import json
import math

import pytest
from command import train

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with a run of `arithmetic_sft` in it, of two steps, for which the task is written."""
    folder = tmp_path_factory.mktemp("arithmetic")
    (folder / "said").write_text(two_steps(folder, "arithmetic_sft").stderr)
    return folder


def two_steps(folder, name, *flags):
    lengths = (
        "--num-train-steps",
        "2",
        "--save-interval",
        "2",
        "--log-interval",
        "1",
        "--lr-schedule.kind",
        "constant",
    )
    sizes = ("--batch-size", "16", "--eval.interval", "0", "--eval.num-rows", "16", "--no-tensorboard")
    sizes += ("--eval.num-prompts", "8" if name == "arithmetic_sft" else "0")
    return train(folder, name, *lengths, *sizes, *flags, OPENPI_TRAIN_HOME=str(folder / "home"))


def lines(folder, name):
    text = (folder / "runs" / name / "x" / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("name", ["arithmetic_reward", "arithmetic_dpo", "arithmetic_dpo_lora"])
def test_each_kind_of_run_starts_from_supervised_training(base, name):
    two_steps(base, name, "--weight-loader.params-path", base / "runs" / "arithmetic_sft" / "x")
    first = next(line for line in lines(base, name) if "pair_accuracy" in line)
    # The score head starts at zero, the policy at its reference; the likelihood term adds about log 16 per token.
    assert first["loss"] - first.get("nll", 0.0) == pytest.approx(math.log(2), rel=1e-5)
    losses = [line["val/loss"] for line in lines(base, name) if "val/loss" in line]
    assert losses[-1] < losses[0]


def test_the_task_is_written_by_the_first_run(base):
    assert "freed memory is kept for the next step" in (base / "said").read_text()
    assert (base / "home" / "datasets" / "arithmetic" / "prepared.json").is_file()
    evaluated = [line for line in lines(base, "arithmetic_sft") if "val/loss" in line]
    losses = [line["val/loss"] for line in evaluated]
    assert losses[-1] < losses[0] == pytest.approx(math.log(16), rel=0.2)
    assert all(0 <= line["val/exact_match"] < 1 and line["val/mean_length"] <= 8 for line in evaluated)
