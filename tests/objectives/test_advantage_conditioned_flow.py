"""Flow matching on stored rows that are told how good they were: against plain flow matching and closed forms."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from objectives.test_indicator_flow import Table
from sampling.test_flow_distribution import nothing

from openpi_train.keys import row_keys
from openpi_train.objectives.advantage_conditioned_flow import AdvantageConditionedFlow
from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.sampling.flow import FlowSampler
from openpi_train.sampling.indicator import BETTER, NONE, WORSE
from openpi_train.types import ActionBatch, tree_of

ROWS, HORIZON, DIMS, DRAWS = 3, 3, 2, 4_000
CHUNKS = np.random.default_rng(0).normal(size=(ROWS, HORIZON, DIMS))
TOLD = np.array([BETTER, WORSE, BETTER])
# The second row's last step is beyond its episode.
STEPS = np.array([[1, 1, 1], [1, 1, 0], [1, 1, 1]], bool)
FLOW = FlowMatching(augment=False, num_flow_draws=4)


class Plain(nnx.Module):
    """A velocity that is told nothing."""

    def velocity(self, seen, noisy, time):
        return jnp.sin(3 * noisy + time[:, :, None, None])


class Conditioned(Plain):
    """The same where it is told nothing."""

    def velocity(self, seen, noisy, time, told):
        return super().velocity(seen, noisy, time) + told[:, :, None, None]


def batch_of(told):
    return tree_of(
        ActionBatch,
        observation=nothing(ROWS),
        actions=jnp.float32(CHUNKS),
        action_mask=jnp.asarray(STEPS),
        dim_mask=jnp.ones((ROWS, DIMS), bool),
        row=jnp.arange(ROWS),
        label=jnp.float32(told),
    )


def loss_of(objective, model, told=TOLD):
    batch = batch_of(told)
    return objective.loss(model, batch, objective.norms(batch), row_keys(0, 0, batch.row))


def test_rows_that_are_told_nothing_are_plain_flow_matching():
    objective = AdvantageConditionedFlow(flow=FLOW)
    plain = loss_of(FLOW, Plain())[0]
    assert loss_of(objective, Conditioned(), [NONE] * ROWS)[0] == plain
    assert abs(loss_of(objective, Conditioned())[0] - plain) > 1e-3


@pytest.mark.slow
def test_each_velocity_learns_from_the_rows_that_it_is_told():
    """At 0 the slope of the squared error of v is 2 v - 2 (noise - chunk), whose mean is 2 chunk."""
    drop = 0.3
    objective = AdvantageConditionedFlow(flow=dataclasses.replace(FLOW, num_flow_draws=DRAWS), drop=drop)
    slopes = jax.grad(lambda values: loss_of(objective, Table(values))[0])(jnp.zeros(3))
    of_rows = 2 * (STEPS[..., None] * CHUNKS).sum((1, 2)) / (STEPS.sum() * DIMS)
    expected = [drop * of_rows.sum(), (1 - drop) * of_rows[[0, 2]].sum(), (1 - drop) * of_rows[1]]
    # The mean of the noise of so many elements, four deviations.
    np.testing.assert_allclose(slopes, expected, atol=8 / (DRAWS * STEPS.sum() * DIMS) ** 0.5)


def test_the_shares_of_better_and_worse_count_elements():
    metrics = loss_of(AdvantageConditionedFlow(flow=FLOW), Conditioned())[1]
    np.testing.assert_allclose([metrics["better"], metrics["worse"]], [6 / 8, 2 / 8], rtol=1e-6)


def test_settings_that_cannot_work_are_refused_and_it_acts_by_guidance():
    def problem(**settings):
        (found,) = AdvantageConditionedFlow(**settings).check()
        return found

    assert "--objective.drop 1.0 must be between 0 and 1" in problem(drop=1.0)
    assert "--objective.guidance -1 must be at least 0" in problem(guidance=-1)
    assert "--objective.flow.max-delay" in problem(flow=FlowMatching(max_delay=2))
    sampler = AdvantageConditionedFlow(flow=FLOW, guidance=2.0).action_sampler
    assert isinstance(sampler, FlowSampler) and sampler.guidance == 2.0
