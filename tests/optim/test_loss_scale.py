"""The loss scale against DeepSpeed's rule, written out over iteration numbers as DeepSpeed counts them."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from openpi_train.optim import LossScaling


def deepspeeds_scales(overflows, *, initial, window, hysteresis, minimum, factor=2):
    """The scale that each step uses, and whether its overflow is one that DeepSpeed raises an error for.

    The scale grows by `factor` whenever the steps since the last overflow (counted from before the first step where
    there was none) are a multiple of the window; an overflow uses up the hysteresis first, then shrinks it by that.
    """
    scale, left, last = initial, hysteresis, -1
    used, fatal = [], []
    for step, overflow in enumerate(overflows):
        used.append(scale)
        fatal.append(bool(overflow and left == 1 and scale == minimum))
        if overflow:
            scale = max(scale / factor, minimum) if left == 1 else scale
            left, last = max(left - 1, 1), step
        elif (step - last) % window == 0:
            scale, left = scale * factor, hysteresis
    return used, fatal


@pytest.mark.parametrize(("hysteresis", "factor"), [(1, 2), (2, 2), (3, 2), (2, 4)])
@pytest.mark.parametrize("often", [0.05, 0.3, 0.7])
def test_scale_moves_as_deepspeeds(hysteresis, factor, often):
    overflows = np.random.default_rng(int(often * 100)).random(100) < often
    scaling = LossScaling(
        initial=16.0, growth_interval=4, growth=factor, backoff=1 / factor, minimum=0.5, hysteresis=hysteresis
    )
    want, fatal = deepspeeds_scales(
        overflows, initial=16.0, window=4, hysteresis=hysteresis, minimum=0.5, factor=factor
    )
    assert want[-1] < np.finfo(np.float32).max

    def step(scale, overflow):
        return scaling.after(scale, overflow), (scale.value, overflow & ~scaling.can_yield(scale))

    _, (used, given_up) = jax.jit(lambda: jax.lax.scan(step, scaling.first(), overflows))()
    np.testing.assert_array_equal(used, want)
    np.testing.assert_array_equal(given_up, fatal)


def test_defaults_are_deepspeeds():
    """`runtime/constants.py` of DeepSpeed: 2**16, a window of 1,000, hysteresis 2, at least 1; its factor is 2."""
    overflows = [True] * 20 + [False] * 1001
    want, _ = deepspeeds_scales(overflows, initial=2.0**16, window=1000, hysteresis=2, minimum=1.0)
    scaling = LossScaling()
    used = jax.lax.scan(lambda scale, overflow: (scaling.after(scale, overflow), scale.value), scaling.first(),
                        jnp.asarray(overflows))[1]  # fmt: skip
    np.testing.assert_array_equal(used, want)
    assert want[19] == 1.0 and want[-1] == 2.0


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
