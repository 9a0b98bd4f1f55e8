"""Held-out evaluation against numpy, and that batch size, filler rows and devices cannot change it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from trainers import make_trainer

from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.optim import AdamW, LRSchedule
from openpi_train.sharding.mesh import make_mesh
from openpi_train.sharding.strategy import Plan
from openpi_train.training.evaluate import Evaluator
from openpi_train.training.init import create_state

NUM_ROWS = 14


def evaluate(batch_size, devices=1):
    """The values of a fresh state on the same rows, cut into batches, the last one filled up with masked rows."""
    config = toy.LinearConfig()
    plan = Plan(mesh=make_mesh(1, jax.devices()[:devices]), strategy="replicated")
    objective = FlowMatching(augment=False, num_flow_draws=2)
    trainer, layout = make_trainer(config, plan, AdamW(), LRSchedule(), objective=objective, seed=3)
    count = -(-NUM_ROWS // batch_size) * batch_size
    rows = jax.tree.map(lambda leaf: leaf[:count], toy.batch(2 * NUM_ROWS))
    rows = dataclasses.replace(rows, action_mask=rows.action_mask & (rows.row < NUM_ROWS)[:, None])
    batches = []
    for start in range(0, count, batch_size):
        part = jax.tree.map(lambda leaf, start=start: leaf[start : start + batch_size], rows)
        batches.append(jax.device_put(dataclasses.replace(part, row=jnp.arange(batch_size)), plan.batch))
    with jax.set_mesh(plan.real_mesh):
        state = create_state(layout, config, trainer.optimizer, config.frozen, True, 3)
        return Evaluator(trainer, batches, num_sample_steps=3)(state), rows


@pytest.fixture(scope="module")
def whole():
    return evaluate(NUM_ROWS)[0]


@pytest.mark.parametrize(
    ("batch_size", "devices"),
    [pytest.param(7, 1, marks=pytest.mark.slow), (4, 1), (8, 4), pytest.param(2, 2, marks=pytest.mark.slow)],
)
def test_batch_size_devices_and_filler_change_nothing(whole, batch_size, devices):
    values, _ = evaluate(batch_size, devices)
    assert values.keys() == whole.keys()
    for name, value in values.items():
        assert value == pytest.approx(whole[name], rel=2e-6), name


def test_a_fresh_average_scores_as_the_weights_do(whole):
    assert whole["val/loss_ema"] == whole["val/loss"]
    assert whole["val/action_mse_ema"] == whole["val/action_mse"]


def test_the_baseline_is_the_variance_of_the_actions_that_count(whole):
    rows = evaluate(NUM_ROWS)[1]
    actions, steps = np.asarray(rows.actions, np.float64), np.asarray(rows.action_mask)
    own = [actions[..., dim][steps] for dim in range(actions.shape[-1]) if rows.dim_mask[0, dim]]
    spread = np.concatenate([values - values.mean() for values in own])
    assert whole["val/action_mse_mean_baseline"] == pytest.approx(np.mean(spread**2), rel=1e-6)
