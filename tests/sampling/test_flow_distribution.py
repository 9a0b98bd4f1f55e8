"""Distribution of flows: what is drawn has the probability that it is scored with, and its gradient is the policy's."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

from openpi_train.keys import draw_noise, row_keys
from openpi_train.sampling.flow import euler
from openpi_train.sampling.flow_distribution import FlowDistribution
from openpi_train.types import Observation, tree_of

FLOW_SDE = json.loads((Path(__file__).parent / "flow_sde" / "recorded.json").read_text())


class Field:
    """A model with the velocity f(x, t); counts its calls."""

    def __init__(self, function):
        self.function, self.calls = function, 0

    def context(self, observation):
        return observation

    def velocity(self, seen, noisy, time):
        self.calls += 1
        return self.function(noisy, time[..., None, None])


def nothing(*axes):
    """An observation of no image and no prompt."""
    text = jnp.zeros((*axes, 0))
    known = {"state": text, "prompt_tokens": text.astype(jnp.int32), "prompt_mask": text.astype(bool)}
    return tree_of(Observation, images={}, image_masks={}, **known)


def drawn(distribution, model, rows, chunk=(1, 1), is_executed=True):
    """The chains of these rows; of each the same values were executed."""

    @jax.jit  # one program: operations alone are compiled each
    def noisy(rows):
        keys = row_keys(0, 0, rows)
        return distribution.draw(model, nothing(len(rows)), draw_noise(keys, *chunk), keys).noisy

    return traces_of(distribution, noisy(jnp.asarray(rows)), rows, is_executed)


def traces_of(distribution, noisy, rows, is_executed=True):
    """One query in each row."""
    executed = jnp.broadcast_to(jnp.asarray(is_executed), (len(rows), 1, *noisy.shape[2:]))
    kept = {"noisy": noisy[:, None]}
    return distribution.traces(nothing(len(rows), 1), kept, executed, jnp.asarray(rows))


def scores(distribution, model, traces):
    """Scored as a step does, in one program."""
    return jax.jit(lambda traces: distribution.scores(model, traces))(traces)


def gaussian(x, t, mean=0.6, std=0.5):
    """The velocity of data N(mean, std^2): E[noise - data | x]."""
    variance = t**2 + ((1 - t) * std) ** 2
    return -mean + (t - (1 - t) * std**2) / variance * (x - (1 - t) * mean)


@pytest.mark.slow
@pytest.mark.parametrize("corrected", [True, False])
def test_a_drawn_chain_has_the_density_that_it_is_scored_with(corrected):
    distribution = FlowDistribution(num_steps=4, drift_correction=corrected, noise=0.4)
    model = Field(gaussian)
    traces = drawn(distribution, model, np.arange(8), (3, 2))
    model.calls = 0
    found = scores(distribution, model, traces)
    assert model.calls == 1
    noisy = np.asarray(traces.noisy[:, 0], np.float64)
    t = np.array([1.0, 0.75, 0.5, 0.25])[:, None, None]
    v, std = gaussian(noisy[:, :-1], t), 0.001 + 0.399 * t
    if corrected:
        sigma = 0.4 * np.sqrt(t / (1 - np.minimum(t, 0.75)))
        std = sigma / 2
        v = v + sigma**2 / (2 * t) * (noisy[:, :-1] + (1 - t) * v)
    expected = norm.logpdf(noisy[:, 1:], noisy[:, :-1] - v / 4, std).sum((-2, -1))
    # float32 against float64.
    np.testing.assert_allclose(found.log_prob, expected, rtol=1e-4, atol=1e-4)
    score = jax.jit(lambda traces: distribution.scores(model, traces).log_prob)
    np.testing.assert_array_equal(jnp.exp(score(traces) - score(traces)), 1)


@pytest.mark.parametrize("num_steps", [1, 4, 10])
def test_a_step_has_the_mean_and_the_deviation_of_rlinf_and_flow_grpo(num_steps):
    """At time 1, too, where the diffusion is infinite; `flow_sde/make.py` recorded what their code gives."""
    distribution, recorded = (
        FlowDistribution(num_steps=num_steps, noise=FLOW_SDE["noise"]),
        FLOW_SDE["steps"][str(num_steps)],
    )
    time = jnp.asarray(distribution.times())
    mean = distribution.mean(jnp.asarray(recorded["noisy"]), jnp.asarray(recorded["velocity"]), time)
    # The times are sums in float32 here.
    np.testing.assert_allclose(mean, recorded["mean"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(distribution.std(time), recorded["std"], rtol=1e-5)


# Two of three control steps, and two dims of a robot where the model has three.
EXECUTED = np.array([[True, True, False], [True, True, False], [False, False, False]])


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_only_executed_values_count_and_ratios_and_entropies_do_not_depend_on_padding(reduction):
    """Against scipy's Gaussian: density and entropy of what was executed, of a chunk in a larger model, too."""
    distribution = FlowDistribution(num_steps=2, noise=0.4, reduction=reduction)
    reduce = np.sum if reduction == "sum" else np.mean
    traces = drawn(distribution, Field(gaussian), np.arange(4), (3, 3), EXECUTED)
    found = scores(distribution, Field(gaussian), traces)
    noisy, t = np.asarray(traces.noisy[:, 0], np.float64), np.array([1.0, 0.5])[:, None, None]
    sigma = 0.4 * np.sqrt(t / 0.5)
    v = gaussian(noisy[:, :-1], t)
    mean = noisy[:, :-1] - (v + sigma**2 / (2 * t) * (noisy[:, :-1] + (1 - t) * v)) / 2
    each = norm.logpdf(noisy[:, 1:], mean, sigma / np.sqrt(2))[:, :, EXECUTED]
    np.testing.assert_allclose(found.log_prob, reduce(each, axis=-1), rtol=1e-4, atol=1e-4)
    entropy = norm.entropy(scale=np.broadcast_to(sigma / np.sqrt(2), (2, 3, 3))[:, EXECUTED])
    np.testing.assert_allclose(found.entropy, np.broadcast_to(reduce(entropy, axis=-1), (4, 2)), rtol=1e-5)
    # In a model with more steps and dims the same.
    padded = jnp.pad(traces.noisy[:, 0], ((0, 0), (0, 0), (0, 2), (0, 4)), constant_values=3.0)
    executed = np.pad(EXECUTED, ((0, 2), (0, 4)))
    other = scores(distribution, Field(gaussian), traces_of(distribution, padded, np.arange(4), executed))
    np.testing.assert_allclose(other.log_prob, found.log_prob, rtol=1e-6)
    np.testing.assert_allclose(other.entropy, found.entropy, rtol=1e-6)


@pytest.mark.slow
def test_rows_of_robots_with_other_dims_and_of_cut_chunks_count_their_own_values():
    distribution = FlowDistribution(num_steps=2, noise=0.4)
    whole = drawn(distribution, Field(gaussian), np.arange(3), (3, 3), EXECUTED)
    others = [np.ones((3, 3), bool), EXECUTED, np.arange(9).reshape(3, 3) < 1]
    mixed = traces_of(distribution, whole.noisy[:, 0], np.arange(3), np.array(others)[:, None])
    found = scores(distribution, Field(gaussian), mixed).log_prob
    for row, executed in enumerate(others):
        alone = scores(
            distribution, Field(gaussian), traces_of(distribution, whole.noisy[:, 0], np.arange(3), executed)
        )
        np.testing.assert_allclose(found[row], alone.log_prob[row], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_query_without_executed_values_has_finite_scores(reduction):
    distribution = FlowDistribution(num_steps=2, noise=0.4, reduction=reduction)
    traces = drawn(distribution, Field(gaussian), np.arange(2), (3, 2), is_executed=False)
    found = scores(distribution, Field(gaussian), traces)
    assert not found.log_prob.any() and not found.entropy.any()


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_what_the_sampler_says_of_its_chain_is_what_is_scored(reduction):
    distribution, keys = FlowDistribution(num_steps=4, noise=0.4, reduction=reduction), row_keys(0, 0, jnp.arange(5))
    _, kept = jax.jit(lambda keys: distribution.drawn(Field(gaussian), nothing(5), keys, (3, 3)))(keys)
    executed = np.broadcast_to(EXECUTED, (5, 3, 3))
    said = distribution.sampling_log_probs(jax.device_get(kept), executed)
    traces = traces_of(distribution, kept["noisy"], np.arange(5), EXECUTED)
    scored = scores(distribution, Field(gaussian), traces).log_prob
    # Another program: rounding in units of the least deviation, 0.1.
    np.testing.assert_allclose(said, scored, rtol=1e-4, atol=1e-4)
    without = FlowDistribution(num_steps=4, noise=0.0)
    still, told = jax.jit(lambda keys: without.drawn(Field(gaussian), nothing(5), keys, (3, 3)))(keys)
    assert np.isfinite(still).all() and not told["log_probs"].any()


def test_mean_is_that_of_the_reference_form():
    distribution = FlowDistribution(num_steps=10, noise=0.4 / (0.7 / 0.3) ** 0.5)
    found = distribution.mean(jnp.full((1, 1, 1), 1.3), jnp.full((1, 1, 1), -0.8), jnp.full(1, 0.7))
    np.testing.assert_allclose(found.item(), 1.3678857, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.0, 0.3, 0.7])
def test_noise_leaves_the_distribution_of_gaussian_data(noise):
    ends = drawn(FlowDistribution(num_steps=100, noise=noise), Field(gaussian), np.arange(20_000)).noisy[:, 0, -1]
    # The oracle allows 2 %: Euler steps give .494 at K = 100.
    np.testing.assert_allclose([ends.mean(), ends.std()], [0.6, 0.5], rtol=0.02)


def test_without_noise_the_steps_are_those_of_euler():
    distribution, keys = FlowDistribution(num_steps=7, noise=0.0), row_keys(0, 0, jnp.arange(5))
    noise = draw_noise(keys, 3, 2)
    expected = euler(lambda x, t: gaussian(x, t[:, None, None]), noise, 7, keep=True)
    found = jax.jit(lambda noise: distribution.draw(Field(gaussian), nothing(5), noise, keys).noisy)(noise)
    # Another program: the last bits.
    np.testing.assert_allclose(found, expected.noisy, atol=1e-6)


@pytest.mark.slow
def test_score_function_gradient_is_the_closed_form_only_with_all_steps():
    distribution = FlowDistribution(num_steps=4, noise=0.4, least_std=0.4, drift_correction=False)

    def model(slope):
        return Field(lambda x, t: slope * x - 0.5)

    traces = drawn(distribution, model(0.8), np.arange(100_000))
    noisy = traces.noisy[:, 0, :, 0, 0]

    @jax.jit
    def score_of(slope, traces):
        return jax.jvp(lambda slope: distribution.scores(model(slope), traces).log_prob, (slope,), (1.0,))[1]

    score = score_of(0.8, traces)

    def gradient(ends, score):
        reward = -((ends - 1) ** 2)
        each = np.asarray((reward - reward.mean()) * score.sum(axis=1))
        return each.mean(), 4 * each.std() / len(each) ** 0.5

    for ends, scored, expected in (
        (noisy[:, -1], score, 0.4657),
        (noisy[:, 3] - 0.25 * (0.8 * noisy[:, 3] - 0.5), score[:, :3], 0.326),
    ):
        found, error = gradient(ends, scored)
        assert abs(found - expected) < error < 0.05


@pytest.mark.slow
def test_permuted_rows_permute_chains():
    distribution, order = FlowDistribution(num_steps=3), np.array([2, 0, 3, 1])
    one, other = (drawn(distribution, Field(gaussian), rows, (3, 2)).noisy for rows in (np.arange(4), order))
    np.testing.assert_array_equal(one[order], other)
