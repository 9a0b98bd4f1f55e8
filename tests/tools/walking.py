"""A world for `data collect` to record: a walk to a goal, by an expert that sometimes stays where it is."""

import dataclasses

import jax
import numpy as np

from openpi_train.envs.env import Env, EnvObservation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Walk(Env):
    """The state is (place, goal); an action moves. The expert of task k fails rollouts whose key says so, k in 4."""

    cameras = ("front",)
    action_dim = 1
    state_dim = 2
    control_hz = 1.0
    max_steps = 8
    has_expert = True

    @property
    def tasks(self):
        return ("sure", "hard", "harder", "impossible")

    def instruction(self, task):
        return f"walk, {self.tasks[task]}"

    def reset(self, keys, tasks):
        numbers = np.asarray(jax.random.key_data(keys))[:, 1]
        stays = numbers % 4 < np.where(np.asarray(tasks) == 3, 4, np.asarray(tasks))
        return np.stack([np.zeros(len(numbers)), 2.0 + numbers % 3, stays], axis=1)

    def step(self, states, actions):
        return states + np.pad(np.asarray(actions), ((0, 0), (0, 2)))

    def observe(self, states):
        pictures = np.broadcast_to(states[:, 0, None, None, None].astype(np.uint8), (len(states), 4, 5, 3))
        return EnvObservation(
            images={"front": pictures}, state=states[:, :2].astype(np.float32), task=np.zeros(len(states), np.int32)
        )

    def success(self, states):
        return states[:, 0] >= states[:, 1]

    def demonstrate(self, states, keys):
        commands = np.where(states[:, 2:] > 0, 0.0, 1.0).astype(np.float32)
        return commands, commands
