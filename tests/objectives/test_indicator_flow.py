"""Flow matching with an indicator: closed forms of a model that says the same everywhere for each thing it is told."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from objectives.test_weighted_flow import ADVANTAGES, CHUNKS, DIMS, HORIZON, batch_of
from sampling.test_flow_distribution import nothing

from openpi_train.keys import row_keys
from openpi_train.objectives.indicator_flow import IndicatorFlow
from openpi_train.sampling.flow import FlowSampler
from openpi_train.sampling.flow_distribution import FlowDistribution
from openpi_train.sampling.indicator import BETTER, NONE, WORSE
from openpi_train.types import ActionBatch, RolloutBatch, tree_of

LAW = FlowDistribution(num_steps=2, guidance=1.0)
# Of the five queries that count, three are better than expected and two worse.
COUNTED = np.array([[1, 1], [1, 1], [1, 0]], bool)
IS_BETTER = np.array([[1, 1], [0, 0], [1, 0]], bool)
# Two demonstrations beside each rollout; one ends after two steps.
SHOWN = np.random.default_rng(1).normal(size=(3, 2, HORIZON, DIMS))
STEPS = np.ones((3, 2, HORIZON), bool)
STEPS[1, 0, 2] = False


class Table(nnx.Module):
    """The velocity is `values[told]` everywhere."""

    def __init__(self, values):
        self.values = values

    def velocity(self, seen, noisy, time, told):
        return jnp.broadcast_to(self.values[told][:, :, None, None], noisy.shape)


def with_demonstrations(batch):
    shown = tree_of(
        ActionBatch,
        observation=nothing(3, 2),
        actions=jnp.float32(SHOWN),
        action_mask=jnp.asarray(STEPS),
        dim_mask=jnp.ones((3, 2, DIMS), bool),
        row=jnp.repeat(jnp.arange(3)[:, None], 2, axis=1),
    )
    return tree_of(RolloutBatch, **{**vars(batch), "demonstrations": shown})


def gradient(objective, batch, values=(0.0, 0.0, 0.0)):
    """The loss, and its slope by the velocity of each thing that is told."""
    keys = row_keys(0, 0, batch.traces.row)

    def loss(values):
        return objective.loss(Table(values), batch, objective.norms(batch), keys)[0]

    return jax.value_and_grad(loss)(jnp.float32(jnp.array(values)))


def expected_slopes(weights, elements):
    """At 0 the slope of the squared error of v is 2 v - 2 (noise - chunk), whose mean is 2 chunk: weights by query."""
    return [2 * (weight[..., None, None] * CHUNKS).sum() / elements for weight in weights]


ELEMENTS = 5 * HORIZON * DIMS
# The mean of the noise of so many elements, four deviations.
TOLERANCE = 8 / (2 * 4_000 * HORIZON * DIMS) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("drop", [0.3])
def test_dropped_tells_how_good_a_chunk_was_or_nothing(drop):
    objective = IndicatorFlow(distribution=LAW, drop=drop, num_flow_draws=4_000)
    loss, slopes = gradient(objective, batch_of())
    weights = np.array([drop * COUNTED, (1 - drop) * IS_BETTER, (1 - drop) * (COUNTED & ~IS_BETTER)])
    np.testing.assert_allclose(slopes, expected_slopes(weights, ELEMENTS), atol=TOLERANCE)
    # The variance of the noise, and the square of the chunks.
    counted = (COUNTED[..., None, None] * CHUNKS**2).sum() / ELEMENTS
    assert loss == pytest.approx(1 + counted, rel=0.02)


@pytest.mark.slow
def test_both_branches_have_the_same_noise_and_their_weights():
    objective = IndicatorFlow(distribution=LAW, form="both", unconditional_weight=0.1, num_flow_draws=8)
    _, slopes = gradient(objective, batch_of())
    better = batch_of(counts=IS_BETTER)
    # Where all queries that count are better, one slope is a tenth of the other, to the last bits.
    _, alone = gradient(objective, better)
    np.testing.assert_allclose(alone[NONE], 0.1 * alone[BETTER], rtol=1e-5)
    np.testing.assert_allclose(alone[BETTER] * 3, slopes[BETTER] * 5, rtol=1e-5)
    assert slopes[WORSE] == alone[WORSE] == 0 and abs(slopes[NONE] - 0.1 * slopes[BETTER]) > 1e-3
    many = dataclasses.replace(objective, num_flow_draws=4_000)
    weights = np.array([0.1 * COUNTED, IS_BETTER, np.zeros_like(COUNTED)], float)
    np.testing.assert_allclose(gradient(many, batch_of())[1], expected_slopes(weights, ELEMENTS), atol=TOLERANCE)


def test_an_advantage_of_nothing_tells_nothing():
    """Its group has one outcome: neither better nor worse."""
    objective = IndicatorFlow(distribution=LAW)
    batch = batch_of(advantages=ADVANTAGES * [[1], [0], [1]])
    known, counts = objective.told(batch)
    np.testing.assert_array_equal(np.asarray(known)[COUNTED], [BETTER, BETTER, NONE, NONE, BETTER])
    np.testing.assert_array_equal(counts, COUNTED)
    assert gradient(objective, batch)[1][WORSE] == 0


def test_demonstrations_are_better_and_count_by_their_steps():
    objective = IndicatorFlow(distribution=LAW, drop=0.3, num_flow_draws=4_000)
    none = batch_of(counts=np.zeros_like(COUNTED))
    _, slopes = gradient(objective, with_demonstrations(none))
    steps = STEPS[..., None] * np.ones(DIMS)
    mean = 2 * (steps * SHOWN).sum() / steps.sum()
    np.testing.assert_allclose(slopes, [0.3 * mean, 0.7 * mean, 0], atol=TOLERANCE)
    # Beside own chunks every element counts the same.
    _, both = gradient(objective, with_demonstrations(batch_of()))
    own = gradient(objective, batch_of())[1]
    total = ELEMENTS + steps.sum()
    np.testing.assert_allclose(both, (own * ELEMENTS + slopes * steps.sum()) / total, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_micro_batches_add_up_and_what_does_not_count_changes_nothing():
    objective, whole = IndicatorFlow(distribution=LAW, num_imitated=2), with_demonstrations(batch_of())
    norms = objective.norms(whole)

    @jax.jit
    def of_part(part):
        keys = row_keys(0, 0, part.traces.row)
        return jax.grad(lambda values: objective.loss(Table(values), part, norms, keys)[0])(jnp.zeros(3))

    def share(rows, batch=whole):
        return np.asarray(of_part(jax.tree.map(lambda leaf: leaf[rows], batch)))

    parts = sum(share(np.array(rows)) for rows in ([0, 2], [1]))
    np.testing.assert_allclose(parts, share(np.arange(3)), rtol=1e-5, atol=1e-6)
    chunks = CHUNKS.copy()
    chunks[2, 1], chunks[:, :, 2] = 1e6, -1e6  # a query that was never made, and a step that is not imitated
    garbage = with_demonstrations(batch_of(chunks))
    np.testing.assert_array_equal(share(np.arange(3), garbage), share(np.arange(3)))


def test_settings_that_cannot_work_are_refused():
    def problem(**settings):
        (found,) = IndicatorFlow(**{"distribution": LAW, **settings}).check()
        return found

    assert "--objective.distribution.guidance is not given" in problem(distribution=FlowDistribution())
    assert "--objective.guidance -0.5 must be at least 0" in problem(guidance=-0.5)
    assert "--objective.drop 0.0 must be between 0 and 1" in problem(drop=0.0)
    assert "--objective.unconditional-weight 0" in problem(form="both", unconditional_weight=0.0)
    assert not IndicatorFlow().check()
    assert IndicatorFlow(guidance=2.5).action_sampler == FlowSampler(guidance=2.5)
