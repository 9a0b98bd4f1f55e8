"""The value function of stored episodes: cross-entropy over bins, against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from sampling.test_flow_distribution import nothing

from openpi_train.nn.return_head import ReturnHead, bin_returns, in_bins, mean_return
from openpi_train.objectives.return_distribution import ReturnDistribution
from openpi_train.types import ActionBatch, tree_of

RETURNS = np.array([-1.0, -0.6, -0.25, 0.0], np.float32)
LOGITS = np.random.default_rng(0).normal(size=(4, 5))


class Says(nnx.Module):
    """The logits of each row, in order."""

    def __init__(self, logits):
        self.logits = jnp.float32(logits)

    def return_logits(self, observation):
        return self.logits[observation.state[:, 0].astype(int)]


def batch_of(rows, counts=(1, 1, 1, 1)):
    observation = nothing(len(rows))
    observation = tree_of(type(observation), **{**vars(observation), "state": jnp.float32(rows)[:, None]})
    mask = jnp.asarray(np.array(counts, bool)[list(rows)])[:, None] & jnp.ones((1, 3), bool)
    return tree_of(
        ActionBatch,
        observation=observation,
        actions=jnp.zeros((len(rows), 3, 2)),
        action_mask=mask,
        dim_mask=jnp.ones((len(rows), 2), bool),
        row=jnp.asarray(rows),
        label=jnp.asarray(RETURNS[list(rows)]),
    )


def test_a_return_is_the_mean_of_the_two_nearest_bins():
    """Bins at -1, -0.75, -0.5, -0.25 and 0; -0.6 lies at 0.6 of the way from -0.75 to -0.5."""
    expected = [[1, 0, 0, 0, 0], [0, 0.4, 0.6, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 1]]
    np.testing.assert_allclose(in_bins(jnp.asarray(RETURNS), 5), expected, atol=1e-6)
    np.testing.assert_allclose(in_bins(jnp.asarray(RETURNS), 201) @ bin_returns(201), RETURNS, atol=1e-6)
    np.testing.assert_array_equal(in_bins(jnp.array([-3.0, 2.0]), 3), [[1, 0, 0], [0, 0, 1]])


def test_the_loss_is_the_cross_entropy_of_rows_that_count():
    counts = np.array([1, 1, 0, 1])
    batch = batch_of(range(4), counts)
    objective = ReturnDistribution()
    loss, metrics = objective.loss(Says(LOGITS), batch, objective.norms(batch), None, train=False)
    probabilities = np.exp(LOGITS) / np.exp(LOGITS).sum(1, keepdims=True)
    # By hand: the weights of each row's bins.
    of_rows = -np.array(
        [
            np.log(probabilities[0, 0]),
            0.4 * np.log(probabilities[1, 1]) + 0.6 * np.log(probabilities[1, 2]),
            np.log(probabilities[2, 3]),
            np.log(probabilities[3, 4]),
        ]
    )
    np.testing.assert_allclose(loss, (counts * of_rows).sum() / 3, rtol=1e-5)
    values = probabilities @ [-1, -0.75, -0.5, -0.25, 0]
    np.testing.assert_allclose(metrics["value_error"], (counts * abs(values - RETURNS)).sum() / 3, rtol=1e-5)
    np.testing.assert_allclose(mean_return(jnp.float32(LOGITS)), values, rtol=1e-5)


def test_micro_batches_add_up():
    objective, whole = ReturnDistribution(), batch_of(range(4))
    norms = objective.norms(whole)
    parts = [objective.loss(Says(LOGITS), batch_of(rows), norms, None, train=False)[0] for rows in ([0, 2], [1, 3])]
    np.testing.assert_allclose(sum(parts), objective.loss(Says(LOGITS), whole, norms, None, train=False)[0], rtol=1e-6)


def test_a_new_head_knows_nothing_and_teaches_its_inputs():
    """All bins are equally likely at first; unlike a critic's, its gradient reaches what it reads."""
    head = ReturnHead(2, 5, nnx.Rngs(0))
    features = jnp.ones((3, 2))
    np.testing.assert_allclose(jax.nn.softmax(head(features)), np.full((3, 5), 0.2), rtol=1e-6)
    head.layer_out.kernel[...] = jax.random.normal(jax.random.key(0), head.layer_out.kernel.shape)
    assert (jax.grad(lambda x: mean_return(head(x)).sum())(features) != 0).all()
