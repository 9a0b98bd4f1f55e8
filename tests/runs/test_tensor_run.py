"""A run whose devices share out heads and wide layers, continued on another layout."""

import json

import pytest
from command import check, losses, openpi_train, places, train

pytestmark = [pytest.mark.slow]
RUN = ("debug", "--save-interval", "2", "--keep-last", "3", "--no-tensorboard", "--eval.num-rows", "8")
GROUPS = ("--sharding.tensor-devices", "2", "--sharding.strategy", "zero3", "--sharding.min-shard-mib", "0")


def evaluations(base):
    """Everything that was evaluated, by step."""
    lines = (base / "runs" / "debug" / "x" / "metrics.jsonl").read_text().splitlines()
    found = {line["step"]: line for line in map(json.loads, lines) if "val/loss" in line}
    return {step: [line[name] for name in ("val/loss", "val/action_mse")] for step, line in found.items()}


def test_a_run_in_tensor_groups_goes_on_without_them_as_one_that_never_had_any(tmp_path):
    alone, grouped = tmp_path / "alone", tmp_path / "grouped"
    train(alone, *RUN, "--num-train-steps", "4")
    done = train(grouped, *RUN, *GROUPS, "--num-train-steps", "2", devices=4)
    assert "effective batch size 8: 4 rows x 2 groups of 2 devices x 1 micro-batches" in done.stderr
    results = json.loads((grouped / "runs" / "debug" / "x" / "results.json").read_text())
    assert {"strategy": "zero3", "fsdp_devices": 2, "tensor_devices": 2}.items() <= results["distributed_info"].items()
    train(grouped, *RUN, "--num-train-steps", "4", "--resume")
    assert losses(grouped) == pytest.approx(losses(alone), rel=1e-5)
    for step, values in evaluations(alone).items():
        assert evaluations(grouped)[step] == pytest.approx(values, rel=1e-5)


def test_a_size_that_does_not_divide_is_refused_with_what_is_allowed(tmp_path):
    done = openpi_train(*RUN, "--sharding.tensor-devices", "4", "--devices-per-process", "4", *places(tmp_path))
    check(done, 2, "--sharding.tensor-devices 4 does not divide the model's siglip.num_heads 2; allowed: 1, 2")
