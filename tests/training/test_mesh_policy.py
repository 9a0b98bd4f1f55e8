"""The policy that is being trained, acting on all devices: what it carries out is what its chunks say."""

import dataclasses

import following
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from flax import nnx
from trainers import make_trainer

from openpi_train.data.robot.windows import WindowShape
from openpi_train.envs.closed_loop import ClosedLoop
from openpi_train.evaluation.closed_loop_success import MeshPolicy
from openpi_train.optim import AdamW, LRSchedule
from openpi_train.parallel.mesh import make_mesh
from openpi_train.parallel.strategy import Plan

HORIZON = 4


class Next(nnx.Module):
    """Says that it goes on from where it is: by 0.5, 2.5, 4.5, ... in the first dim; the second is -1, 3, 7, ...

    For those are the means and the spreads of the norm stats.
    """

    def __init__(self, config, rngs):
        self.kernel = nnx.Param(jnp.ones((config.action_dim, config.action_dim)))

    def sample_actions(self, observation, noise, num_steps):
        return jnp.broadcast_to(jnp.arange(noise.shape[1], dtype=jnp.float32)[:, None], noise.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NextConfig(toy.LinearConfig):
    action_dim: int = following.MODEL_DIMS
    action_horizon: int = HORIZON

    def build(self, rngs):
        return Next(self, rngs)


@pytest.mark.parametrize(
    ("first_action", "expected"),
    # From 7 on by 0.5 and 2.5, then by 0.5 from there. Of chunks that begin in the past the present comes second.
    [(0, [7.5, 9.5, 10.0, 12.0, 12.5]), (-1, [9.5, 11.5, 14.0, 16.0, 18.5])],
)
def test_each_chunk_is_relative_to_the_present_state_and_begins_at_the_present_step(first_action, expected):
    plan = Plan(mesh=make_mesh(1, jax.devices()[:2]), strategy="replicated")
    trainer, layout = make_trainer(
        NextConfig(), plan, AdamW(), LRSchedule(), objective=toy.FlowThatSamplesItself(), ema=None
    )
    translation = following.translation(WindowShape(horizon=HORIZON, first_action=first_action))
    config = ClosedLoop(env=following.Follow(), episodes_per_device=2)
    policy = MeshPolicy(trainer, translation, config, num_sample_steps=1)
    with jax.set_mesh(plan.real_mesh):
        params = {path: jnp.ones(leaf.shape) for path, leaf in layout.shapes.params.items()}
        policy.params = jax.device_put(params, plan.replicated)
        found = following.executed(policy, execute=2, steps=5, rows=3)
    np.testing.assert_allclose(found[..., 0], [expected] * 3, rtol=1e-5)  # the scale is 1e-6 more than the spread
    second = [-1.0, 3.0, -1.0, 3.0, -1.0] if first_action == 0 else [3.0, 7.0, 3.0, 7.0, 3.0]
    np.testing.assert_allclose(found[..., 1], [second] * 3, rtol=1e-5)
