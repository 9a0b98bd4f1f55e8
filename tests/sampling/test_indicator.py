"""Guidance by an indicator (ALGORITHMS, F6): 0 is what is told nothing, 1 what is told `better`, the rest is a line."""

import jax.numpy as jnp
import numpy as np
import pytest
from sampling.test_flow_distribution import nothing

from openpi_train.keys import draw_noise, row_keys
from openpi_train.runtime.exits import UsageError
from openpi_train.sampling.denoising import DenoisingSampler
from openpi_train.sampling.flow import FlowSampler, with_guidance
from openpi_train.sampling.flow_distribution import FlowDistribution
from openpi_train.sampling.indicator import BETTER, NONE, WORSE, check_guidance, conditioned_velocity
from openpi_train.sampling.noise_schedule import NoiseSchedule
from openpi_train.sampling.real_time_chunking import Guide

SHIFT = {NONE: 0.25, BETTER: -0.5, WORSE: 8.0}


class Told:
    """A model whose velocity is half of x, and more by what it is told; keeps the number of draws of its calls."""

    def __init__(self):
        self.draws = []

    def context(self, observation):
        return observation

    def velocity(self, seen, noisy, time, told=None):
        self.draws.append(time.shape[1])
        shift = 100.0 if told is None else jnp.array([SHIFT[one] for one in range(3)])[told][..., None, None]
        return 0.5 * noisy + shift * time[..., None, None]


NOISY, TIME = np.random.default_rng(0).normal(size=(2, 3, 4, 5)), np.array([[0.2, 0.5, 1.0], [0.3, 0.7, 0.9]])


@pytest.mark.parametrize(
    ("guidance", "draws", "shift"), [(None, 3, 100.0), (0.0, 3, 0.25), (1.0, 3, -0.5), (3.0, 6, -2.0), (0.5, 6, -0.125)]
)
def test_velocities_lie_on_a_line(guidance, draws, shift):
    model = Told()
    found = conditioned_velocity(model, None, jnp.float32(NOISY), jnp.float32(TIME), guidance)
    np.testing.assert_allclose(found, 0.5 * NOISY + shift * TIME[..., None, None], rtol=1e-5, atol=1e-6)
    assert model.draws == [draws]
    distribution = FlowDistribution(num_steps=7, guidance=guidance)
    assert distribution.draws_per_row == 7 * draws // 3
    assert distribution.needed == ({"velocity"} if guidance is None else {"velocity", "indicator"})
    assert distribution.action_sampler == FlowSampler(guidance=guidance)


def test_who_acts_and_who_evaluates_are_guided_alike():
    keys = row_keys(0, 0, jnp.arange(4))
    noise = draw_noise(keys, 3, 2)
    distribution = FlowDistribution(num_steps=5, noise=0.0, guidance=2.0)
    drawn = distribution.draw(Told(), nothing(4), noise, keys).actions
    sampled = distribution.action_sampler.sample(Told(), nothing(4), noise, None, 5)
    np.testing.assert_allclose(drawn, sampled, atol=1e-6)
    # x shrinks by a tenth at each of five steps; the shift of 0.25 + 2 x -0.75 is 1.25 t.
    expected = np.asarray(noise)
    for time in (1.0, 0.8, 0.6, 0.4, 0.2):
        expected = expected - 0.2 * (0.5 * expected - 1.25 * time)
    np.testing.assert_allclose(sampled, expected, rtol=1e-5, atol=1e-6)


def test_guidance_may_be_another_than_the_runs():
    guide = Guide(target=jnp.ones((1, 2, 3)), weights=jnp.ones((1, 2, 3)))
    found = with_guidance(FlowSampler(guidance=2.0, guide=guide), 0.5)
    assert (found.guidance, found.guide) == (0.5, guide)
    for sampler in (FlowSampler(), DenoisingSampler(noise_schedule=NoiseSchedule(), kind="ddim")):
        with pytest.raises(UsageError, match=r"guidance 0.5 is for policies .*leave --guidance out"):
            with_guidance(sampler, 0.5)
    with pytest.raises(UsageError, match=r"--guidance -0.5 must be at least 0"):
        with_guidance(FlowSampler(guidance=2.0), -0.5)


def test_guidance_away_from_what_is_better_is_refused():
    assert not check_guidance("--objective.guidance", 0.0) and not check_guidance("--objective.guidance", None)
    assert "--objective.guidance -1.0 must be at least 0" in check_guidance("--objective.guidance", -1.0)[0]
