"""Schedules against their formulas, written out with math; those of DeepSpeed against its own definition."""

import dataclasses
import math
import re

import jax
import numpy as np
import pytest

from openpi_train.optim import LRSchedule

PEAK, END, WARM, TOTAL = 1e-2, 1e-3, 10, 110


def rates(schedule, num_steps=TOTAL + 20):
    return np.asarray(jax.vmap(schedule.create())(np.arange(num_steps)))


def expected(after, num_steps=TOTAL + 20):
    """openpi's linear warm-up, then `after` of the step."""
    start = PEAK / (WARM + 1)
    return [start + (PEAK - start) * step / WARM if step < WARM else after(step) for step in range(num_steps)]


def fraction(step, start=WARM):
    return min((step - start) / (TOTAL - start), 1.0)


FALLS = {
    "linear": lambda u: PEAK + (END - PEAK) * u,
    "cosine": lambda u: END + (PEAK - END) * (1 + math.cos(math.pi * u)) / 2,
    "1-sqrt": lambda u: END + (PEAK - END) * (1 - math.sqrt(u)),
}
BASE = LRSchedule(warmup_steps=WARM, peak_lr=PEAK, decay_steps=TOTAL, decay_lr=END)


@pytest.mark.parametrize(
    ("kind", "after"),
    [
        ("constant", lambda step: PEAK),
        ("linear", lambda step: FALLS["linear"](fraction(step))),
        ("cosine", lambda step: FALLS["cosine"](fraction(step))),
        ("rsqrt", lambda step: PEAK / math.sqrt(1 + (step - WARM) / TOTAL)),
    ],
)
def test_every_kind_follows_its_formula(kind, after):
    np.testing.assert_allclose(rates(dataclasses.replace(BASE, kind=kind)), expected(after), rtol=1e-5)


@pytest.mark.parametrize("tail", ["linear", "cosine", "1-sqrt"])
def test_wsd_is_stable_then_falls_in_its_last_part(tail):
    schedule = dataclasses.replace(BASE, kind="wsd", tail=tail, tail_ratio=0.2)
    begin = TOTAL - 22

    def after(step):
        return PEAK if step < begin else FALLS[tail](fraction(step, begin))

    np.testing.assert_allclose(rates(schedule), expected(after), rtol=1e-5)


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_warm_up_is_deepspeeds(kind):
    """`WarmupLR._get_gamma` of DeepSpeed: log(step + 1) / log(n), or step / n; then the peak."""
    gamma = {"log": lambda step: math.log(step + 1) / math.log(WARM), "linear": lambda step: step / WARM}[kind]
    schedule = dataclasses.replace(BASE, kind="constant", warmup_shape=kind, warmup_lr=1e-4)
    want = [1e-4 + (PEAK - 1e-4) * (gamma(step) if step < WARM else 1) for step in range(30)]
    np.testing.assert_allclose(rates(schedule, 30), want, rtol=1e-5)


def test_a_logarithmic_warm_up_of_one_or_two_steps_is_divided_by_log_2():
    """DeepSpeed takes at least 2 for the number of warm-up steps there."""
    for warmup_steps, want in (
        (1, [1e-4, PEAK, PEAK]),
        (2, [1e-4, PEAK, PEAK]),
        (3, [1e-4, 1e-4 + (PEAK - 1e-4) * math.log(2) / math.log(3), PEAK]),
    ):
        schedule = LRSchedule(
            kind="constant", warmup_shape="log", warmup_lr=1e-4, peak_lr=PEAK, warmup_steps=warmup_steps
        )
        np.testing.assert_allclose(rates(schedule, 4)[:3], want, rtol=1e-6)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "rsqrt", "wsd"])
def test_without_a_warm_up_the_first_step_has_the_peak_and_the_end_comes_at_its_step(kind):
    found = rates(dataclasses.replace(BASE, kind=kind, warmup_steps=0, decay_steps=20, tail="linear", tail_ratio=0.25))
    assert found[0] == np.float32(PEAK)
    # What stays at the peak, when the fall begins, and when it is over.
    last_peak, end = {"constant": (129, None), "rsqrt": (0, None), "wsd": (15, 20)}.get(kind, (0, 20))
    assert np.array_equal(np.flatnonzero(found == np.float32(PEAK)), np.arange(last_peak + 1))
    if end:
        np.testing.assert_allclose(found[end:], END, rtol=1e-6)
        assert np.all(np.diff(found[last_peak : end + 1]) < 0)


def test_ratio_and_missing_end_follow_the_length_of_the_run():
    schedule = LRSchedule(kind="linear", warmup_ratio=0.1, decay_steps=None, peak_lr=PEAK, decay_lr=0.0)
    with pytest.raises(ValueError, match="over"):
        schedule.create()
    resolved = schedule.over(200)
    assert (resolved.warmup_steps, resolved.decay_steps) == (20, 200)
    values = rates(resolved, 201)
    np.testing.assert_allclose([values[20], values[110], values[200]], [PEAK, PEAK / 2, 0], rtol=1e-6, atol=1e-9)
    assert LRSchedule(warmup_ratio=0.1, decay_steps=100).over(200).warmup_steps == 20
    assert LRSchedule().over(123) == LRSchedule()


def test_a_warm_up_that_fills_the_run_is_shortened_to_a_tenth_if_it_may_be():
    own = LRSchedule(warmup_steps=500, decay_steps=None, decay_lr=0.0)
    assert "must be greater than lr_schedule.warmup_steps 500" in own.check(132)[0]
    shorter = dataclasses.replace(own, shorten_warmup=True)
    assert shorter.check(132) == [] == shorter.check(500) == shorter.check(1)
    assert [shorter.over(steps).warmup_steps for steps in (132, 500, 501, 9)] == [13, 50, 500, 0]
    assert dataclasses.replace(shorter, kind="constant").over(132).warmup_steps == 500
    assert dataclasses.replace(shorter, decay_steps=400).check(132)


# math.ceil(num_training_steps * warmup_ratio), `TrainingArguments.get_warmup_steps` of transformers 4 and 5.
@pytest.mark.parametrize(("ratio", "steps", "warm_up"), [(0.03, 101, 4), (0.1, 30, 3), (0.1, 1001, 101), (0.0, 7, 0)])
def test_a_fraction_of_the_run_is_rounded_up(ratio, steps, warm_up):
    assert LRSchedule(warmup_ratio=ratio, decay_steps=None).over(steps).warmup_steps == warm_up


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"warmup_ratio": 0.1, "warmup_lr": 0.0, "kind": "linear", "decay_steps": None, "decay_lr": 0.0},
         "from 0 to 0.001 in 20 steps, then linearly to 0 at step 200"),
        ({"warmup_steps": 0, "kind": "constant"}, "0.001, and constant"),
        ({"warmup_steps": 500, "warmup_lr": 0.0, "warmup_shape": "log", "kind": "constant"},
         "from 0 to 0.001, by the logarithm, in 500 steps, and constant"),
        ({"warmup_steps": 9, "decay_steps": 100, "decay_lr": 1e-4},
         "from 0.0001 to 0.001 in 9 steps, then by a cosine to 0.0001 at step 100"),
        ({"warmup_steps": 0, "kind": "rsqrt", "decay_steps": 50},
         "0.001, then by the inverse square root of time, in units of 50 steps"),
        ({"warmup_steps": 0, "kind": "wsd", "decay_steps": None, "decay_lr": 0.0},
         "0.001, then constant, and from step 180 on to 0 at step 200 (1-sqrt)"),
    ],
)  # fmt: skip
def test_a_schedule_says_what_its_rates_are(changes, words):
    schedule = LRSchedule(peak_lr=1e-3, **changes)
    assert schedule.in_words(200) == words
    values = rates(schedule.over(200), 201)
    if "wsd" in changes.values():
        assert values[180] == np.float32(1e-3) > values[181] and values[200] == 0
    if "from" in words.split(",")[0]:
        start, warm_up = float(words.split()[1]), schedule.over(200).warmup_steps
        np.testing.assert_allclose(values[0], start, rtol=1e-6)  # float32
        assert warm_up > 200 or values[warm_up] == np.float32(1e-3) > values[warm_up - 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"warmup_ratio": 1.0}, "--lr-schedule.warmup-ratio 1.0 must lie in"),
        ({"kind": "wsd", "tail_ratio": 0.95}, r"--lr-schedule.tail-ratio 0.95 .* at most 0.909"),
        ({"kind": "wsd", "tail_ratio": 0.0}, "must be above 0"),
        ({"kind": "linear", "warmup_steps": 200}, "--lr-schedule.decay-steps"),
        ({"warmup_lr": 1.0}, "--lr-schedule.warmup-lr 1.0 must lie between 0 and peak_lr"),
        ({"kind": "wsd", "decay_lr": 1.0}, "lower --lr-schedule.decay-lr"),
    ],
)
def test_what_cannot_be_is_refused_with_its_flag(changes, message):
    (problem,) = dataclasses.replace(BASE, **changes).check(TOTAL)
    assert re.search(message, problem), problem
    assert not BASE.check(TOTAL)


def test_a_run_of_one_step_has_no_warm_up_of_a_fraction():
    schedule = LRSchedule(warmup_ratio=0.1, decay_steps=None)
    assert schedule.check(1) == [] and schedule.over(1).warmup_steps == 0 and schedule.over(2).warmup_steps == 1


@pytest.mark.parametrize(
    ("steps", "changes", "words"),
    [
        # optax: half a cosine from 1 to .1 of the peak is at (1 + .1) / 2 after half of its steps.
        (101, {}, "this run ends at step 101, at 0.00055 (--lr-schedule.decay-steps None ends the fall with the run)"),
        (300, {}, "the last 100 of this run's 300 steps stay there (--lr-schedule.decay-steps None ends the fall with"),
        (200, {}, ""),
        (300, {"decay_steps": None}, ""),
        (300, {"kind": "constant"}, ""),
        (300, {"kind": "rsqrt"}, ""),
        (300, {"decay_lr": 1e-3}, ""),
    ],
)
def test_a_fall_that_does_not_end_with_the_run_is_told(steps, changes, words):
    schedule = LRSchedule(**{"warmup_steps": 0, "decay_steps": 200, "peak_lr": 1e-3, "decay_lr": 1e-4, **changes})
    assert schedule.misfit(steps).startswith(words) and bool(words) == bool(schedule.misfit(steps))


def test_what_a_longer_run_changes_of_the_rate_is_told_with_what_keeps_it():
    # Linearly from 1e-3 at step 0 to 0 at the end: at step 100 of 200 half of it is left.
    falling = LRSchedule(kind="linear", warmup_steps=0, decay_steps=None, peak_lr=1e-3, decay_lr=0.0)
    assert falling.lengthened(100, 200) == (
        "the learning rate is spread over the run's length: at step 100 it is 0.0005, and was 0 in a run of 100 steps; "
        "--lr-schedule.decay-steps 100 leaves it as it was, 0 in the last step"
    )
    assert not dataclasses.replace(falling, decay_steps=300).lengthened(100, 200)
    assert not dataclasses.replace(falling, kind="constant").lengthened(100, 200)
