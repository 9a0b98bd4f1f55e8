"""The decay of the average: diffusion_policy's own numbers, and what is refused."""

import dataclasses

import diffusion_case
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from openpi_train.optim import EmaWarmup
from openpi_train.parallel.mesh import make_mesh
from openpi_train.parallel.state import TrainState
from openpi_train.parallel.strategy import Plan
from openpi_train.parallel.update import Update


def test_decays_are_those_of_diffusion_policy():
    warmup = EmaWarmup(power=0.75)
    found = [float(warmup.decay(0.9999, step)) for step in range(6)]
    np.testing.assert_allclose(found, [0, 0, 0.405396, 0.561309, 0.646447, 0.700930], atol=5e-7)
    np.testing.assert_allclose(warmup.decay(0.9999, 100), 0.968377, atol=5e-7)
    for after, step, decay in diffusion_case.facts()["ema"]:
        own = EmaWarmup(power=0.75, update_after_step=after).decay(0.9999, np.int32(step))
        np.testing.assert_allclose(own, decay, rtol=2e-7, atol=1e-7)


def test_the_warm_up_takes_as_many_times_longer_as_its_gamma_says():
    warmup = EmaWarmup(power=0.5, inv_gamma=20.0)
    # The square root of 1 + 60 / 20 is 2.
    assert float(warmup.decay(0.9999, 61)) == pytest.approx(0.5, rel=1e-6)
    assert float(warmup.decay(0.9999, 21)) == pytest.approx(1 - 0.5**0.5, rel=1e-6)


def test_a_decay_lies_between_the_least_and_the_most_once_there_is_an_average():
    found = [float(EmaWarmup(power=0.75, min_decay=0.5).decay(0.6, step)) for step in range(6)]
    np.testing.assert_allclose(found, [0, 0, 0.5, 0.561309, 0.6, 0.6], atol=5e-7)


def test_an_average_is_the_parameters_twice_and_goes_by_the_step_of_the_state_from_there_on():
    update = Update(optax.sgd(1.0), Plan(mesh=make_mesh(1), strategy="replicated"), 0.9999, EmaWarmup(power=0.75))
    params = {"w": jnp.float32(10.0)}
    state = TrainState(step=jnp.int32(0), params=params, frozen={}, ema=params, opt_state=optax.sgd(1.0).init(params))
    averages = []
    for step in range(4):
        state = dataclasses.replace(state, step=jnp.int32(step))
        state = update(state, {"w": jnp.float32(1.0)}, jnp.bool_(True))
        averages.append(float(state.ema["w"]))
    third = 0.405396 * 8 + (1 - 0.405396) * 7
    np.testing.assert_allclose(averages, [9, 8, third, 0.561309 * third + (1 - 0.561309) * 6], rtol=1e-6)


def test_without_a_power_the_decay_is_the_given_number_itself():
    assert EmaWarmup().decay(0.99, 0) == 0.99


def test_what_cannot_be_is_refused_with_the_flag():
    assert not EmaWarmup(power=0.75).check(0.9999) and not EmaWarmup().check(None)
    for warmup, most, flag in (
        (EmaWarmup(power=0.75), None, "--ema-decay None"),
        (EmaWarmup(power=0.0), 0.9, "--ema-warmup.power 0.0"),
        (EmaWarmup(power=0.75, min_decay=0.95), 0.9, "--ema-warmup.min-decay 0.95"),
        (EmaWarmup(inv_gamma=2.0), 0.9, "without --ema-warmup.power"),
    ):
        (problem,) = warmup.check(most)
        assert flag in problem
