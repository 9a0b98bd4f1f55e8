"""A critic in a world of two states: where episodes never end by themselves, its values are those of the equations.

From state 0 a step pays 0, from state 1 it pays 1. Either state is followed by the other one. With the discount g the
values are v0 = g / (1 - g^2) and v1 = 1 / (1 - g^2), however early episodes are cut.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from openpi_train.nn.value_head import ValueHead
from openpi_train.objectives.policy_gradient import PolicyGradient
from openpi_train.rl.estimator import AdvantageEstimator, Decisions
from openpi_train.types import RolloutBatch, tree_of

GAMMA, QUERIES, STATES = 0.8, 3, np.eye(2, dtype=np.float32)
TRUE = np.array([GAMMA, 1.0]) / (1 - GAMMA**2)


def learned(*, bootstrap):
    """The values of both states after a critic has learnt from episodes of three steps from either state."""
    head, tx = ValueHead(2, nnx.Rngs(0)), optax.adam(3e-3)
    graph, params = nnx.split(head, nnx.Param)
    estimator = AdvantageEstimator(kind="gae", gamma=GAMMA, lam=0.5)
    objective = PolicyGradient(value_weight=1.0)
    visited = (np.arange(2)[:, None] + np.arange(QUERIES + 1)) % 2  # 2 q+1
    counts, state = np.ones((2, QUERIES), bool), tx.init(params)

    @jax.jit
    def update(params, state, old, returns):
        def loss(params):
            values = nnx.merge(graph, params)(jnp.asarray(STATES[visited[:, :-1].ravel()])).reshape(2, QUERIES)
            return objective._value_error(values, tree_of(RolloutBatch, values=old, returns=returns)).mean()

        updates, state = tx.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    for _ in range(150):
        values = np.asarray(nnx.merge(graph, params)(jnp.asarray(STATES)), np.float64)[visited]
        last = values[:, -1] if bootstrap else np.zeros(2)
        decisions = Decisions(rewards=visited[:, :-1].astype(float), last_values=last)
        rewards = decisions.rewards.sum(axis=1)
        _, returns = estimator(rewards, np.arange(2), counts, None, values[:, :-1], decisions=decisions)
        for _ in range(4):
            given = (jnp.asarray(one, jnp.float32) for one in (values[:, :-1], returns))
            params, state = update(params, state, *given)
    return np.asarray(nnx.merge(graph, params)(jnp.asarray(STATES)))


def test_its_values_are_those_of_a_world_that_goes_on():
    np.testing.assert_allclose(learned(bootstrap=True), TRUE, rtol=0.02)


def test_without_the_value_after_a_cut_they_are_too_small():
    """As of episodes of one to three more steps."""
    assert (learned(bootstrap=False) < 0.75 * TRUE).all()


@pytest.mark.parametrize("width", [1, 5])
def test_it_begins_at_0(width):
    assert (ValueHead(width, nnx.Rngs(1))(jnp.ones((3, width))) == 0).all()
