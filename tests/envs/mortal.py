"""An environment that comes to an end in the middle of an episode, as its field `fate` says. Imports no jax."""

import dataclasses
import os
import time
from pathlib import Path
from typing import ClassVar

import numpy as np

from openpi_train.envs.env import Env, EnvObservation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mortal(Env):
    """The state is the sum of the actions and a start that the key says. At the third control step of task 1 the
    process ends or hangs: always, or if there is no file `once` yet.
    """

    cameras: ClassVar[tuple[str, ...]] = ("eye",)
    action_dim: ClassVar[int] = 2
    state_dim: ClassVar[int] = 2
    control_hz: ClassVar[float] = 1.0
    max_steps: ClassVar[int] = 6
    has_reward: ClassVar[bool] = True
    fate: str = ""
    once: str = ""

    @property
    def tasks(self):
        return ("live", "die")

    def instruction(self, task):
        return self.tasks[task]

    def reset(self, keys, tasks):
        import jax

        start = np.asarray(jax.random.key_data(keys))[:, -1:] % 97 * np.ones(2)
        return start, np.asarray(tasks), 0

    def step(self, states, actions):
        position, tasks, steps = states
        if steps == 2 and tasks.any() and self.fate and self._is_first():
            if self.fate == "raises":
                raise RuntimeError("the arm is broken")
            if self.fate == "hangs":
                time.sleep(600)
            os._exit(7)
        return position + actions, tasks, steps + 1

    def _is_first(self):
        if not self.once:
            return True
        try:
            Path(self.once).touch(exist_ok=False)  # of two processes at the same time, one
        except FileExistsError:
            return False
        return True

    def observe(self, states):
        position, tasks, steps = states
        pictures = np.full((len(tasks), 4, 4, 3), steps, np.uint8) + position[:, :1, None, None].astype(np.uint8)
        return EnvObservation(images={"eye": pictures}, state=position.astype(np.float32), task=tasks)

    def reward(self, states):
        return states[0].sum(axis=1)

    def success(self, states):
        return states[0][:, 1] > 300.0
