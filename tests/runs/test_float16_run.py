"""A whole run in float16 from a DeepSpeed file: it overflows on the way, and resumes with the same scale."""

import json

import pytest
from command import check, copy_without, openpi_train, places, train

pytestmark = [pytest.mark.slow]
# A scale that must overflow at first (2**30 times any gradient), and grows again soon.
FILE = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 2, "overlap_comm": True},
    "fp16": {"enabled": True, "initial_scale_power": 30, "hysteresis": 1, "loss_scale_window": 4},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}
# Of a language model, which compiles in a fraction of pi0's time; pi0 in float16: `tests/training/test_float16.py`.
NAME = "arithmetic_sft"
RUN = (
    NAME,
    "--save-interval",
    "20",
    "--keep-last",
    "3",
    "--no-tensorboard",
    "--log-interval",
    "1",
    "--batch-size",
    "8",
)
RUN += ("--data.text-lengths", "1", "--eval.interval", "0", "--eval.num-prompts", "0", "--eval.num-rows", "8")
RUN += ("--model.sizes.width", "16", "--model.sizes.mlp-dim", "16", "--model.sizes.depth", "1")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Variables of a home folder, where the task is written once."""
    return {"OPENPI_TRAIN_HOME": str(tmp_path_factory.mktemp("home"))}


def lines(base):
    """Step, loss, scale and rate of every line of `metrics.jsonl`."""
    text = (base / "runs" / NAME / "x" / "metrics.jsonl").read_text().splitlines()
    names = ("step", "loss", "loss_scale", "learning_rate", "grad_norm")
    return [{name: line.get(name) for name in names} for line in map(json.loads, text) if "loss_scale" in line]


def test_resumed_run_equals_an_uninterrupted_one_and_keeps_its_scale(tmp_path, home):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(FILE))
    flags = (*RUN, "--deepspeed", file, "--fsdp-devices", "2")
    straight, halves = tmp_path / "straight", tmp_path / "halves"
    done = train(straight, *flags, "--num-train-steps", "40", devices=2, **home)
    assert "--model.dtype float16" in done.stderr
    assert "effective batch size 16: 4 rows x 2 devices x 2 micro-batches" in done.stderr
    copy_without(straight, halves, 40, NAME)
    done = train(halves, *flags, "--num-train-steps", "40", "--resume", devices=2, **home)
    whole = lines(straight)
    assert "continuing from step 20 of 40" in done.stderr
    assert lines(halves) == whole
    assert [line["step"] for line in whole] == list(range(1, 41))
    scales = [line["loss_scale"] for line in whole]
    assert scales[0] == 2.0**30
    assert min(scales) < scales[-1]  # it fell, and grew again
    assert [line["loss"] for line in whole if line["loss_scale"] == 2.0**30] == [None]
    report = json.loads((straight / "runs" / NAME / "x" / "metrics.jsonl").read_text().splitlines()[-1])
    assert report["step"] == 40


def test_a_scale_that_cannot_shrink_stops_the_run(tmp_path, home):
    flags = ("--model.dtype", "float16", "--loss-scaling.initial", str(2.0**30), "--loss-scaling.minimum", str(2.0**29))
    done = openpi_train(*RUN, *flags, "--loss-scaling.hysteresis", "1", *places(tmp_path), **home)
    check(done, 5, "step 2: loss", "at the least --loss-scaling.minimum", "The update was not applied")


def test_a_file_that_does_not_fit_is_refused_before_anything_starts(tmp_path, home):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({**FILE, "train_batch": 3}))
    done = openpi_train(*RUN, "--deepspeed", file, *places(tmp_path), **home)
    check(done, 2, "unknown key train_batch; did you mean train_batch_size?")
    assert not (tmp_path / "runs").exists()
