"""pi0-FAST on two processes, the insulated pi0.5 on one with two devices, each resumed on one device: as one alone."""

import json
from pathlib import Path

import fast_runs
import numpy as np
import pytest
from command import losses, openpi_train, train

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
RUNS = Path(__file__).with_name("fast_runs.py")
LAST = fast_runs.fast.num_train_steps
# Vectors stay whole: each number that is sent alone takes its time.
CUT = "--sharding.strategy zero3 --sharding.min-shard-mib 0.003".split()


@pytest.fixture(scope="module")
def fast_tokenizer(tmp_path_factory):
    base = tmp_path_factory.mktemp("tokenizer")
    flags = ("--vocab-size", "300", "--out", base / "fast", "--assets-base-dir", base / "assets")
    done = openpi_train("data", "fit-fast", f"{RUNS}:fast", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "held-out chunks of 28 values" in done.stdout and "use it with --model.fast-tokenizer" in done.stdout
    return base / "fast"


@pytest.mark.parametrize(("experiment", "processes"), [("fast", 2), ("insulated", 1)], ids=["fast", "insulated"])
def test_two_devices_then_one_give_the_losses_of_one(tmp_path, fast_tokenizer, experiment, processes):
    flags = (f"{RUNS}:{experiment}", "--model.fast-tokenizer", fast_tokenizer, "--data.text-lengths", "1")
    train(
        tmp_path / "two", *flags, *CUT, "--num-train-steps", str(LAST // 2), processes=processes, devices=2 // processes
    )
    plan = json.loads((tmp_path / "two" / "runs" / experiment / "x" / "plan.json").read_text())
    assert plan["compiled_bytes_per_device"]["state"] == pytest.approx(plan["bytes_per_device"]["state"], rel=0.02)
    # The second half on one process with one device.
    train(tmp_path / "two", *flags, "--num-train-steps", str(LAST), "--resume")
    train(tmp_path / "one", *flags)
    resumed, expected = losses(tmp_path / "two", experiment), losses(tmp_path / "one", experiment)
    assert set(resumed) == set(expected) == set(range(1, LAST + 1))
    # Sums in another order: float32's rounding, 1e-6 at most in 50 steps of both (2026-11-22). Losses of
    # neighbouring steps lie 1e-2 apart.
    np.testing.assert_allclose([*resumed.values()], [*expected.values()], rtol=1e-5)
    assert expected[LAST] < 0.9 * expected[1]
    lines = (tmp_path / "two" / "runs" / experiment / "x" / "metrics.jsonl").read_text().splitlines()
    last = [line for line in map(json.loads, lines) if line.get("step") == LAST]
    assert any(0 <= line.get("token_accuracy", -1) <= 1 for line in last)
    assert any(line.get("val/loss", 0) > 0 and line.get("val/action_mse", 0) > 0 for line in last)
