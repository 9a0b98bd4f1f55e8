"""PaliGemma policies through the real command line: two processes under zero3, continued on one, equal to one alone."""

import json

import numpy as np
import pytest
from command import losses, train

from openpi_train.data.fast import fit_fast
from openpi_train.tools.prepare import prepare

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
STEPS = 50
RUN = f"--batch-size 8 --num-train-steps {STEPS} --save-interval {STEPS // 2} --log-interval 1 --no-tensorboard".split()
RUN += "--eval.interval 25 --eval.num-rows 8".split()
ZERO3 = "--fsdp-devices 4 --sharding.strategy zero3 --sharding.min-shard-mib 0".split()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The project's folder, with a small tabletop dataset in it, and a FAST tokenizer of any chunks."""
    folder = tmp_path_factory.mktemp("home")
    prepare(folder / "datasets", episodes_per_task=2, val_episodes_per_task=1)
    chunks = np.clip(np.random.default_rng(0).normal(scale=0.5, size=(200, 4, 7)), -1, 1)
    fit_fast(chunks, vocab_size=384).save(folder / "datasets" / "tabletop" / "fast")
    return {"OPENPI_TRAIN_HOME": str(folder)}


def evaluations(base, name):
    lines = map(json.loads, (base / "runs" / name / "x" / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["val/loss"] for line in lines if "val/loss" in line}


@pytest.mark.parametrize("name", ["paligemma_tiny", "paligemma_tokens_tiny"])
def test_two_processes_under_zero3_then_one_train_as_one_does(tmp_path, home, name):
    alone, several = tmp_path / "alone", tmp_path / "several"
    train(alone, name, *RUN, **home)
    half = [str(STEPS // 2) if word == str(STEPS) else word for word in RUN]
    train(several, name, *half, *ZERO3, processes=2, devices=2, **home)
    plan = json.loads((several / "runs" / name / "x" / "plan.json").read_text())
    assert (plan["strategy"], plan["fsdp_devices"]) == ("zero3", 4)
    assert plan["compiled_bytes_per_device"]["state"] == pytest.approx(plan["bytes_per_device"]["state"], rel=0.02)
    done = train(several, name, *RUN, "--resume", **home)
    assert "the run began on 4 devices and goes on on 1: same rows, same loss" in done.stdout + done.stderr
    expected, found = losses(alone, name), losses(several, name)
    assert list(found) == list(expected) == list(range(1, STEPS + 1))
    # Sums in another order: float32's rounding at first, then what Adam's division by small moments makes of it.
    for steps, tolerance in ((range(1, 11), 3e-6), (range(11, STEPS + 1), 5e-4)):
        np.testing.assert_allclose([found[s] for s in steps], [expected[s] for s in steps], rtol=tolerance)
    assert np.mean(list(found.values())[-10:]) < 0.8 * np.mean(list(found.values())[:5])
    values, alone_values = evaluations(several, name), evaluations(alone, name)
    np.testing.assert_allclose([values[step] for step in (0, 50)], [alone_values[step] for step in (0, 50)], rtol=1e-3)
    best = json.loads((several / "runs" / name / "x" / "best.json").read_text())
    assert best["step"] == STEPS
