"""Runs that learn from own episodes by regression: they start, learn from an iteration, and go on."""

import json

import jax
import numpy as np
import pytest
from runs.command import ROOT, losses, train

from openpi_train import load_policy

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


WEIGHING, TOLD = (f"{ROOT}/tests/rl/regressing.py:{name}" for name in ("weighing", "told"))


@pytest.fixture(scope="module")
def weighed(tmp_path_factory):
    base = tmp_path_factory.mktemp("weighed")
    train(base, WEIGHING)
    return base


def test_a_run_of_weighted_flow_learns_and_goes_on(weighed):
    started = losses(weighed, "weighing")
    done = train(weighed, WEIGHING, "--num-train-steps", "4", "--resume")
    assert "continuing from step 2 of 4" in done.stdout + done.stderr
    found = losses(weighed, "weighing")
    assert sorted(found) == [1, 2, 3, 4] and {step: found[step] for step in (1, 2)} == started
    assert len(set(found.values())) == 4 and min(found.values()) > 0


def test_a_policy_without_indicator_becomes_one_with(weighed, tmp_path):
    """From its weights; it learns from demonstrations beside its episodes, none of which succeeds. It is loaded with
    its own guidance, 2, or another.
    """
    start = ("--weight-loader.params-path", str(weighed / "runs" / "weighing" / "x"))
    train(tmp_path, TOLD, *start)
    lines = map(json.loads, (tmp_path / "runs" / "told" / "x" / "metrics.jsonl").read_text().splitlines())
    found = [line for line in lines if "loss" in line]
    assert [line["step"] for line in found] == [1, 2] and all(line["loss"] > 0 for line in found)
    assert all(0 <= line["better"] + line["worse"] <= 1 for line in found)
    image = np.random.default_rng(0).integers(0, 255, (16, 16, 3), np.uint8)
    observation = {"observation/image_0": image, "state": np.zeros(7), "prompt": "go"}
    own, same, other = (
        load_policy(tmp_path / "runs" / "told" / "x", guidance=guidance, batch_sizes=(1,), devices=jax.devices()[:1])
        for guidance in (None, 2.0, 0.0)
    )
    chunk = own.infer(observation, draw=0)["actions"]
    np.testing.assert_array_equal(same.infer(observation, draw=0)["actions"], chunk)
    assert not np.array_equal(other.infer(observation, draw=0)["actions"], chunk)
