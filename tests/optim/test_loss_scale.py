"""The loss scale against DeepSpeed's rule, written out over iteration numbers as DeepSpeed counts them."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from openpi_train.optim import LossScaling


def deepspeeds_scales(overflows, *, initial, window, hysteresis, minimum):
    """The scale that each step uses, and whether its overflow is one that DeepSpeed raises an error for.

    The scale doubles whenever the steps since the last overflow (counted from before the first step where there was
    none) are a multiple of the window; an overflow uses up the hysteresis first, then halves.
    """
    scale, left, last = initial, hysteresis, -1
    used, fatal = [], []
    for step, overflow in enumerate(overflows):
        used.append(scale)
        fatal.append(bool(overflow and left == 1 and scale == minimum))
        if overflow:
            scale = max(scale / 2, minimum) if left == 1 else scale
            left, last = max(left - 1, 1), step
        elif (step - last) % window == 0:
            scale, left = scale * 2, hysteresis
    return used, fatal


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
@pytest.mark.parametrize("often", [0.05, 0.3, 0.7])
def test_scale_moves_as_deepspeeds(hysteresis, often):
    overflows = np.random.default_rng(int(often * 100)).random(200) < often
    scaling = LossScaling(initial=16.0, growth_interval=4, minimum=0.5, hysteresis=hysteresis)
    want, fatal = deepspeeds_scales(overflows, initial=16.0, window=4, hysteresis=hysteresis, minimum=0.5)

    def step(scale, overflow):
        return scaling.after(scale, overflow), (scale.value, overflow & ~scaling.can_yield(scale))

    _, (used, given_up) = jax.jit(lambda: jax.lax.scan(step, scaling.first(), overflows))()
    np.testing.assert_array_equal(used, want)
    np.testing.assert_array_equal(given_up, fatal)


def test_a_fixed_scale_stays():
    scaling = LossScaling(initial=128.0, minimum=128.0, growth_interval=0, hysteresis=1)
    scale = scaling.first()
    for overflow in [False, True, False, True]:
        assert not scaling.can_yield(scale)
        scale = scaling.after(scale, jnp.asarray(overflow))
    assert float(scale.value) == 128


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"minimum": 0.0}, "--loss-scaling.minimum 0.0 must be above 0"),
        ({"initial": 0.5}, "at most --loss-scaling.initial 0.5"),
        ({"growth": 1.0}, "--loss-scaling.growth 1.0 above 1"),
        ({"hysteresis": 0}, "--loss-scaling.hysteresis 0 must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused_with_its_flag(changes, flag):
    (problem,) = dataclasses.replace(LossScaling(), **changes).check()
    assert re.search(flag, problem), problem
