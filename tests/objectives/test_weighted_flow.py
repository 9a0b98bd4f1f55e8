"""Weighted flow matching on own chunks (ALGORITHMS, F6): closed forms of a model that says the same everywhere."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from sampling.test_flow_distribution import nothing

from openpi_train.keys import row_keys
from openpi_train.objectives.weighted_flow import WeightedFlow
from openpi_train.sampling.flow_distribution import FlowDistribution
from openpi_train.types import RolloutBatch, tree_of

ROWS, QUERIES, STEPS, HORIZON, DIMS = 3, 2, 2, 3, 2
CHUNKS = np.random.default_rng(0).normal(size=(ROWS, QUERIES, HORIZON, DIMS))
# The last query of the last row was never made.
ADVANTAGES = np.array([[0.5, 0.5], [-1.0, -1.0], [1.5, 0.0]])
COUNTS = np.array([[True, True], [True, True], [True, False]])
LAW = FlowDistribution(num_steps=STEPS)


class Constant(nnx.Module):
    """The velocity is `value` everywhere."""

    def __init__(self, value):
        self.value = value

    def velocity(self, seen, noisy, time):
        return jnp.broadcast_to(self.value, noisy.shape)


def batch_of(chunks=CHUNKS, advantages=ADVANTAGES, counts=COUNTS):
    noisy = jnp.zeros((*chunks.shape[:2], STEPS + 1, HORIZON, DIMS)).at[:, :, -1].set(chunks)
    traces = LAW.traces(
        nothing(*chunks.shape[:2]), {"noisy": noisy}, jnp.ones(chunks.shape, bool), jnp.arange(len(chunks))
    )
    mask, units = (jnp.asarray(np.repeat(one, STEPS, axis=1)) for one in (counts, advantages * counts))
    names = ("log_probs", "sampling_log_probs", "reference_log_probs", "values", "returns", "is_fresh", "is_rollout")
    unused = dict.fromkeys(names, jnp.zeros(len(chunks)))
    return tree_of(RolloutBatch, traces=traces, mask=mask, advantages=units.astype(jnp.float32), **unused)


def gradient(objective, batch, value=0.0, rows=None):
    keys = row_keys(0, 0, jnp.arange(len(batch.mask)) if rows is None else rows)

    def loss(value, batch):
        return objective.loss(Constant(value), batch, objective.norms(batch), keys)[0]

    # One program: operations alone are compiled each.
    return jax.jit(jax.value_and_grad(loss))(jnp.full((HORIZON, DIMS), value), batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({}, [[1, 1], [0, 0], [1, 0]]),
        ({"weights": "exponential"}, np.exp([[0.5, 0.5], [-1, -1], [1.5, -np.inf]])),
        ({"weights": "exponential", "temperature": 2.0}, np.exp([[0.25, 0.25], [-0.5, -0.5], [0.75, -np.inf]])),
        ({"weights": "exponential", "most_weight": 2.0}, [[np.exp(0.5)] * 2, [np.exp(-1)] * 2, [2, 0]]),
    ],
)
def test_the_best_constant_is_minus_the_weighted_mean_of_the_chunks(settings, weights):
    objective = WeightedFlow(distribution=LAW, num_flow_draws=20_000, **settings)
    np.testing.assert_allclose(objective.query_weights(batch_of()), weights, rtol=1e-6)
    _, slope = gradient(objective, batch_of())
    # The loss is quadratic, a mean over elements: at 0 its slope is -2 / elements of the best value.
    best = -np.asarray(slope) * HORIZON * DIMS / 2
    weights = np.asarray(weights)[..., None, None]
    # The mean of the noise of at least two and a half queries.
    np.testing.assert_allclose(best, -(weights * CHUNKS).sum((0, 1)) / weights.sum(), atol=4 / (2.5 * 20_000) ** 0.5)


@pytest.mark.slow
def test_rows_of_weight_0_change_nothing():
    objective = WeightedFlow(distribution=LAW)
    loss, slope = gradient(objective, batch_of())
    chunks, counts = CHUNKS.copy(), COUNTS.copy()
    chunks[1], chunks[2, 1] = 1e6, -1e6
    garbage = gradient(objective, batch_of(chunks))
    np.testing.assert_array_equal(garbage[0], loss)
    np.testing.assert_array_equal(garbage[1], slope)
    counts[1] = False
    np.testing.assert_array_equal(gradient(objective, batch_of(chunks, counts=counts))[1], slope)


@pytest.mark.slow
def test_nothing_better_than_expected_is_finite_and_learns_nothing():
    loss, slope = gradient(WeightedFlow(distribution=LAW), batch_of(advantages=0 * ADVANTAGES))
    assert loss == 0 and not np.asarray(slope).any()


def test_steps_that_are_not_imitated_have_no_gradient():
    loss, slope = gradient(WeightedFlow(distribution=LAW, num_imitated=2), batch_of(), 0.3)
    assert np.asarray(slope)[:2].all() and not np.asarray(slope)[2].any()
    # The mean over the elements that count: of noise of variance 1 and chunks of size 1.
    assert 1 < loss < 4


@pytest.mark.slow
def test_micro_batches_add_up():
    objective, whole = WeightedFlow(distribution=LAW, weights="exponential"), batch_of()
    norms = objective.norms(whole)

    def share(rows):
        part = jax.tree.map(lambda leaf: leaf[rows], whole)
        keys = row_keys(0, 0, part.traces.row)
        slope = jax.grad(lambda value, part: objective.loss(Constant(value), part, norms, keys)[0])
        return jax.jit(slope)(jnp.zeros((HORIZON, DIMS)), part)

    parts = sum(np.asarray(share(np.array(rows))) for rows in ([0, 2], [1]))
    np.testing.assert_allclose(parts, gradient(objective, whole)[1], rtol=1e-5, atol=1e-6)


def test_a_temperature_that_cannot_work_is_refused():
    assert "--objective.temperature 0.0 must be above 0" in WeightedFlow(temperature=0.0).check()[0]
    assert not WeightedFlow(distribution=dataclasses.replace(LAW, noise=0.0)).check()
