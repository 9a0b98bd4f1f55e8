"""PaliGemma's policy with a flow head through the real command line, on two processes under zero3, and then on one.

Its other head, and pi0's: `test_pi0_fast_run.py`.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from command import losses, train

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
EXPERIMENT = f"{Path(__file__).with_name('paligemma_runs.py')}:flow"
STEPS = 14
FIRST, LAST = slice(None, 5), slice(-5, None)
RUN = f"--batch-size 8 --num-train-steps {STEPS} --save-interval {STEPS // 2} --log-interval 1 --no-tensorboard".split()
RUN += f"--eval.interval {STEPS // 2} --eval.num-rows 8 --lr-schedule.warmup-steps 10".split()
RUN += "--eval.num-sample-steps 2".split()
# A loss is the sum of as many as 128 tokens in each of 8 rows. XLA for CPUs adds them up one after the other, with a
# rounding of at most 2**-24 of the sum each: three times what so many make of independent ones. One device and
# several differ by 1e-6 of the first loss after a resume on one, from the same parameters.
SUMMED = 3 * np.sqrt(8 * 128) * 2**-24
# Vectors stay whole: each number that is sent alone takes its time.
ZERO3 = "--fsdp-devices 2 --sharding.strategy zero3 --sharding.min-shard-mib 0.003".split()


def test_two_processes_under_zero3_then_one_train_as_one_does(tmp_path):
    alone, several = tmp_path / "alone", tmp_path / "several"
    train(alone, EXPERIMENT, *RUN, *ZERO3, devices=2)
    half = [str(STEPS // 2) if word == str(STEPS) else word for word in RUN]
    train(several, EXPERIMENT, *half, *ZERO3, processes=2)
    plan = json.loads((several / "runs" / "flow" / "x" / "plan.json").read_text())
    assert (plan["strategy"], plan["fsdp_devices"]) == ("zero3", 2)
    assert plan["compiled_bytes_per_device"]["state"] == pytest.approx(plan["bytes_per_device"]["state"], rel=0.02)
    expected, found = losses(alone, "flow"), losses(several, "flow")
    assert list(found) == list(range(1, STEPS // 2 + 1))
    assert found == {step: expected[step] for step in found}  # as many devices: bit for bit

    done = train(several, EXPERIMENT, *RUN, "--resume")
    assert "the run began on 2 devices and goes on on 1: same rows, same loss" in done.stdout + done.stderr
    found = losses(several, "flow")
    assert list(found) == list(expected) == list(range(1, STEPS + 1))
    # One device sums in another order: rounding at first. At this learning rate it grows tenfold in a few steps, so of
    # the last ones only their mean is the same.
    assert found[STEPS // 2 + 1] == pytest.approx(expected[STEPS // 2 + 1], rel=SUMMED)
    (first, last), (_, resumed) = (
        [np.mean(list(run.values())[part]) for part in (FIRST, LAST)] for run in (expected, found)
    )
    assert resumed == pytest.approx(last, rel=0.01) and resumed < 0.9 * first
    assert json.loads((several / "runs" / "flow" / "x" / "best.json").read_text())["step"] == STEPS
