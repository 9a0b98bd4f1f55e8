"""Real-time chunking on a flow whose every answer is known: standard normal actions, independent of each other.

There E[action | x_t] = (1 - t) x / (t^2 + (1 - t)^2), so the velocity is (x - E) / t; with full weights and no clip the
guided velocity is (x - target) / t, which leads to the target exactly.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from openpi_train.sampling.flow import FlowSampler, euler
from openpi_train.sampling.real_time_chunking import Guide, guided_velocity, prefix_weights

SHAPE = (2, 5, 3)
NOISE, TARGET = (jnp.asarray(np.random.default_rng(seed).normal(size=SHAPE), jnp.float32) for seed in (0, 1))


def expected(x, t):
    return (1 - t) * x / (t**2 + (1 - t) ** 2)


def guide(weights, max_guidance=1e9):
    return Guide(target=TARGET, weights=weights, max_guidance=max_guidance)


def velocity(actions, time):
    t = time[:, None, None]
    return (actions - expected(actions, t)) / t


@pytest.mark.parametrize("t", [0.9, 0.5, 0.2])
def test_with_full_weights_and_no_clip_the_velocity_points_at_the_target(t):
    times = jnp.full(2, t)
    guided = guided_velocity(velocity, NOISE, times, guide(jnp.ones(SHAPE)))
    np.testing.assert_allclose(guided, (NOISE - TARGET) / t, rtol=2e-5, atol=2e-5)


def test_the_clip_and_a_weight_scale_the_correction():
    t, weight = 0.9, 0.3
    guided = guided_velocity(velocity, NOISE, jnp.full(2, t), guide(jnp.full(SHAPE, weight), 2.0))
    slope = (1 - t) / (t**2 + (1 - t) ** 2)
    correction = 2.0 * weight * (TARGET - expected(NOISE, t)) * slope
    np.testing.assert_allclose(guided, velocity(NOISE, jnp.full(2, t)) - correction, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bounds", [None, (10.0, 10.0), (5.0, 1.0)])
def test_guidance_is_that_of_the_papers_code_and_of_lerobots_with_their_bounds(bounds):
    """Their strength is min((1 - tau) / tau * ((1 - tau)^2 + tau^2) / (1 - tau)^2, bound) at tau = 1 - t: near both
    ends the bound, 5 by default, in between 2.
    """
    known = {} if bounds is None else {"max_guidance": jnp.asarray(bounds)}
    given = Guide(target=TARGET, weights=jnp.ones(SHAPE), **known)
    most = np.array(bounds or (5.0, 5.0))[:, None, None]
    for t in (0.95, 0.5, 0.05):
        tau, slope = 1 - t, (1 - t) / (t**2 + (1 - t) ** 2)
        strength = np.minimum((1 - tau) / tau * ((1 - tau) ** 2 + tau**2) / (1 - tau) ** 2, most)
        correction = strength * (TARGET - expected(NOISE, t)) * slope
        found = guided_velocity(velocity, NOISE, jnp.full(2, t), given)
        np.testing.assert_allclose(found, velocity(NOISE, jnp.full(2, t)) - correction, rtol=1e-4, atol=1e-4)


def test_frozen_actions_become_the_target_and_free_ones_what_they_would_have_been():
    weights = jnp.zeros(SHAPE).at[:, :2].set(1.0)

    @jax.jit
    def sample(weights):
        guided = functools.partial(guided_velocity, velocity, guide=guide(weights))
        return euler(guided, NOISE, 10).actions

    found, free = sample(weights), sample(jnp.zeros(SHAPE))
    np.testing.assert_allclose(found[:, :2], TARGET[:, :2], atol=1e-5)
    np.testing.assert_array_equal(found[:, 2:], free[:, 2:])


class Joined:
    """A model with a time for each action: a velocity is the mean of all actions and times, plus the own time."""

    def context(self, observation):
        return observation

    def velocity(self, context, noisy, time):
        t = time[..., None] if time.ndim == 3 else time[:, :, None, None]
        t = jnp.broadcast_to(t, (*noisy.shape[:3], 1))
        return (noisy + t).mean(axis=2, keepdims=True) + t + jnp.zeros_like(noisy)


@pytest.mark.parametrize("delays", [(0, 0), (2, 5), (1, 3)])
def test_a_trained_model_sees_the_prefix_clean_at_time_0_in_every_step_and_leaves_it_as_it_is(delays):
    held = np.arange(SHAPE[1]) < np.array(delays)[:, None]
    weights = jnp.asarray(np.broadcast_to(held[..., None], SHAPE), jnp.float32)
    sampler = FlowSampler(guide=Guide(target=TARGET, weights=weights), max_delay=5)
    seen = toy.batch(2).observation
    found = sampler.sample(Joined(), seen, NOISE, None, 4)
    x = np.where(held[..., None], TARGET, NOISE).astype(np.float64)
    for number in range(4):
        times = np.where(held, 0.0, 1 - number / 4)[..., None]
        x = np.where(held[..., None], x, x - ((x + times).mean(axis=1, keepdims=True) + times) / 4)
    np.testing.assert_allclose(found, x, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(found)[held], np.asarray(TARGET)[held])
    if not any(delays):
        free = FlowSampler(max_delay=5).sample(Joined(), seen, NOISE, None, 4)
        np.testing.assert_allclose(found, free, rtol=1e-6, atol=1e-6)


def test_the_soft_mask_is_the_papers():
    weights = prefix_weights(8, delay=2, execute=3)
    share = [(8 - 3 - i) / (8 - 3 - 2 + 1) for i in (2, 3, 4)]
    by_hand = [1, 1, *(c * (np.e**c - 1) / (np.e - 1) for c in share), 0, 0, 0]
    np.testing.assert_allclose(weights, by_hand, rtol=1e-6)
    assert prefix_weights(4, delay=0, execute=4).tolist() == [0, 0, 0, 0]


def test_a_delay_that_outlasts_the_old_chunk_is_refused():
    with pytest.raises(ValueError, match="the delay may be at most 5"):
        prefix_weights(8, delay=6, execute=3)
