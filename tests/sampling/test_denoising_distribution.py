"""Distribution of diffusion policies: what is drawn has the probability that it is scored with, by DDPM's posterior."""

import jax.numpy as jnp
import numpy as np
import pytest
from sampling.test_flow_distribution import nothing, traces_of
from scipy.stats import norm

from openpi_train.keys import draw_noise, row_keys
from openpi_train.sampling.denoising_distribution import DenoisingDistribution
from openpi_train.sampling.noise_schedule import NoiseSchedule
from openpi_train.types import ChainTraces, tree_of

STEPS, CHUNK = 5, (3, 2)


class Shrinking:
    """Predicts clean actions: a part of the noisy ones that depends on the diffusion step. Counts its calls."""

    def __init__(self):
        self.calls = 0

    def context(self, observation):
        return "seen"

    def denoise(self, context, noisy, step):
        assert context == "seen"
        self.calls += 1
        return self.clean(noisy, step[..., None, None])

    def clean(self, noisy, step):
        return 0.9 * noisy / (1 + step / 50) + 0.1


def drawn(distribution, model, rows):
    keys = row_keys(0, 0, jnp.asarray(rows))
    return traces_of(
        distribution, distribution.draw(model, nothing(len(rows)), draw_noise(keys, *CHUNK), keys).noisy, rows
    )


def posterior(acp, before, clean, noisy):
    """p(x_before | x, clean), by Bayes: what the clean actions say of it, and what the noisy ones say, by precision."""
    ratio = acp / before
    first, second = 1 / max(1 - before, 1e-300), ratio / (1 - ratio)
    mean = (first * np.sqrt(before) * clean + second * noisy / np.sqrt(ratio)) / (first + second)
    return mean, np.sqrt(1 / (first + second))


@pytest.mark.slow
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("least_std", [1e-4, 0.1])
def test_a_drawn_chain_has_the_density_of_ddpms_posterior(clip, least_std):
    schedule = NoiseSchedule(prediction_type="sample", clip_sample=clip)
    distribution, model = (
        DenoisingDistribution(num_steps=STEPS, noise_schedule=schedule, least_std=least_std),
        Shrinking(),
    )
    traces = drawn(distribution, model, np.arange(6))
    model.calls = 0
    scores = distribution.scores(model, traces)
    found, entropy = scores.log_prob, scores.entropy
    assert model.calls == 1 and found.shape == (6, STEPS)
    noisy = np.asarray(traces.noisy[:, 0], np.float64)
    visited = [80, 60, 40, 20, 0]
    stds = []
    for index, step in enumerate(visited):
        clean = model.clean(noisy[:, index], step)
        clean = clean.clip(-1, 1) if clip else clean
        before = 1.0 if index == STEPS - 1 else schedule.alphas_cumprod[visited[index + 1]]
        mean, std = posterior(schedule.alphas_cumprod[step], before, clean, noisy[:, index])
        stds.append(max(std, least_std))
        expected = norm.logpdf(noisy[:, index + 1], mean, stds[-1]).sum((-2, -1))
        np.testing.assert_allclose(entropy[:, index], norm.entropy(scale=stds[-1]) * np.prod(CHUNK), rtol=1e-5)
        # The mean is a difference of float32 numbers of size 1, in units of the deviation.
        np.testing.assert_allclose(found[:, index], expected, rtol=1e-4, atol=1e-6 / stds[-1] ** 2)
    assert stds[-1] == least_std and stds[0] > 0.1


@pytest.mark.slow
def test_queries_of_an_rollout_are_scored_one_by_one():
    distribution, model = DenoisingDistribution(num_steps=STEPS), Shrinking()
    one = drawn(distribution, model, np.arange(6))
    both = tree_of(
        ChainTraces,
        observation=nothing(3, 2),
        noisy=one.noisy.reshape(3, 2, *one.noisy.shape[2:]),
        is_executed=one.is_executed.reshape(3, 2, *CHUNK),
        row=jnp.arange(3),
    )
    single = distribution.scores(model, one)
    np.testing.assert_allclose(distribution.scores(model, both).log_prob, single.log_prob.reshape(3, -1), rtol=1e-6)


def test_what_cannot_be_scored_is_refused():
    assert "least_std 0.0 must be above 0" in DenoisingDistribution(least_std=0.0).check()[0]
    assert "num_steps 101 must be at most 100" in DenoisingDistribution(num_steps=101).check()[0]
    assert not DenoisingDistribution().check()
