"""PaliGemma policies through the real command line: two processes under zero3, continued on one, equal to one alone."""

import json
from pathlib import Path

import numpy as np
import pytest
from command import losses, train

from openpi_train.data.fast_tokenizer import fit_fast

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
RUNS = Path(__file__).with_name("paligemma_runs.py")
STEPS = 14
FIRST, LAST = slice(None, 5), slice(-5, None)
RUN = f"--batch-size 8 --num-train-steps {STEPS} --save-interval {STEPS // 2} --log-interval 1 --no-tensorboard".split()
RUN += f"--eval.interval {STEPS // 2} --eval.num-rows 8 --lr-schedule.warmup-steps 10".split()
# A loss is the sum of as many as 128 tokens in each of 8 rows. XLA for CPUs adds them up one after the other, with a
# rounding of at most 2**-24 of the sum each: three times what so many make of independent ones. One device and
# several differ by 1e-6 of the first loss after a resume on one, from the same parameters.
SUMMED = 3 * np.sqrt(8 * 128) * 2**-24
# Vectors stay whole: each number that is sent alone takes its time.
ZERO3 = "--fsdp-devices 2 --sharding.strategy zero3 --sharding.min-shard-mib 0.003".split()


@pytest.fixture(scope="module")
def fast_tokenizer(tmp_path_factory):
    """The folder of a FAST tokenizer of any chunks."""
    chunks = np.clip(np.random.default_rng(0).normal(scale=0.5, size=(200, 4, 7)), -1, 1)
    return fit_fast(chunks, vocab_size=384).save(tmp_path_factory.mktemp("tokenizer") / "fast")


# Short samples: nothing is said of them here.
@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        ("flow", "--eval.num-sample-steps 2"),
        ("tokens", "--model.max-decoding-steps 16 --model.fast-tokenizer FAST"),
    ],
    ids=["flow", "tokens"],
)
def test_two_processes_under_zero3_then_one_train_as_one_does(tmp_path, fast_tokenizer, name, sampling):
    alone, several = tmp_path / "alone", tmp_path / "several"
    run = (*RUN, *sampling.replace("FAST", str(fast_tokenizer)).split())
    experiment = f"{RUNS}:{name}"
    train(alone, experiment, *run, *ZERO3, devices=2)
    half = [str(STEPS // 2) if word == str(STEPS) else word for word in run]
    train(several, experiment, *half, *ZERO3, processes=2)
    plan = json.loads((several / "runs" / name / "x" / "plan.json").read_text())
    assert (plan["strategy"], plan["fsdp_devices"]) == ("zero3", 2)
    assert plan["compiled_bytes_per_device"]["state"] == pytest.approx(plan["bytes_per_device"]["state"], rel=0.02)
    expected, found = losses(alone, name), losses(several, name)
    assert list(found) == list(range(1, STEPS // 2 + 1))
    # As many devices: the same to rounding. (The flow head's bit for bit; the token head's only with as many threads,
    # NPROC, in both runs: docs/numerics.md.)
    np.testing.assert_allclose(list(found.values()), [expected[step] for step in found], rtol=1e-6)

    done = train(several, experiment, *run, "--resume")
    assert "the run began on 2 devices and goes on on 1: same rows, same loss" in done.stdout + done.stderr
    found = losses(several, name)
    assert list(found) == list(expected) == list(range(1, STEPS + 1))
    # One device sums in another order: rounding at first. At this learning rate it grows tenfold in a few steps, so of
    # the last ones only their mean is the same.
    assert found[STEPS // 2 + 1] == pytest.approx(expected[STEPS // 2 + 1], rel=SUMMED)
    (first, last), (_, resumed) = (
        [np.mean(list(run.values())[part]) for part in (FIRST, LAST)] for run in (expected, found)
    )
    assert resumed == pytest.approx(last, rel=0.01) and resumed < 0.9 * first
    assert json.loads((several / "runs" / name / "x" / "best.json").read_text())["step"] == STEPS
