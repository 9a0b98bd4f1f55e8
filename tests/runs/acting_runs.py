"""A world without cameras in which any policy succeeds now and then, and a tiny policy in it."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from tiny_policies import blind

from openpi_train.envs.closed_loop import ClosedLoop
from openpi_train.envs.env import Env, EnvObservation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drift(Env):
    """The state is a running sum of actions; task k succeeds when the sum of its dims is beyond a bound."""

    cameras: ClassVar[tuple[str, ...]] = ()
    action_dim: ClassVar[int] = 7
    state_dim: ClassVar[int] = 7
    control_hz: ClassVar[float] = 5.0
    max_steps: ClassVar[int] = 12

    @property
    def tasks(self):
        return ("near", "far")

    def instruction(self, task):
        return f"drift {self.tasks[task]}"

    def reset(self, keys, tasks):
        start = jax.vmap(lambda key: jax.random.normal(key, (7,)))(keys)
        return np.asarray(start) * 0.05, np.asarray(tasks)

    def step(self, states, actions):
        return np.asarray(states[0] + np.asarray(actions), np.float32), states[1]

    def observe(self, states):
        return EnvObservation(images={}, state=jnp.asarray(states[0], jnp.float32), task=jnp.asarray(states[1]))

    def pictures(self, states, rows):
        colour = np.clip(128 + 200 * states[0][rows][:, None, None, :3], 0, 255).astype(np.uint8)
        return {"from_above": np.broadcast_to(colour, (len(rows), 32, 32, 3))}

    def success(self, states):
        return jnp.asarray(np.abs(states[0][:, :6]).sum(1) > np.array([0.4, 0.6])[states[1]])


drift = dataclasses.replace(
    blind,
    num_train_steps=2,
    save_interval=2,
    eval=dataclasses.replace(
        blind.eval, closed_loop=ClosedLoop(env=Drift(), episodes_per_task=5, episodes_per_device=4, execute=3)
    ),
)
"""A tiny policy without cameras, which drifts."""
