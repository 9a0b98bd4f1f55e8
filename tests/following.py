"""A world whose state is the last action that was carried out: what a policy did can be read off, number for number."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from openpi_train.data.robot.normalize import NormStats
from openpi_train.data.robot.transforms import NoPrompt, Normalize
from openpi_train.data.robot.translation import Translation
from openpi_train.data.robot.windows import WindowShape
from openpi_train.envs.env import Env, EnvObservation
from openpi_train.envs.rollout import rollout
from openpi_train.robots.robot import Robot

START = 7.0
MEAN, STD = np.array([0.5, -1.0]), np.array([2.0, 4.0])
MODEL_DIMS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Follow(Env):
    """Two dims, both at 7 in the beginning. Task k succeeds when the first is beyond `goals[k]`."""

    cameras: ClassVar[tuple[str, ...]] = ()
    action_dim: ClassVar[int] = 2
    state_dim: ClassVar[int] = 2
    control_hz: ClassVar[float] = 1.0
    max_steps: ClassVar[int] = 20
    goals: tuple[float, ...] = (np.inf,)

    @property
    def tasks(self):
        return tuple(f"beyond_{goal:g}" for goal in self.goals)

    def instruction(self, task):
        return self.tasks[task]

    def reset(self, keys, tasks):
        return np.full((len(tasks), 2), START), np.asarray(tasks)

    def step(self, states, actions):
        return np.asarray(actions, np.float64), states[1]

    def observe(self, states):
        return EnvObservation(images={}, state=jnp.asarray(states[0], jnp.float32), task=jnp.asarray(states[1]))

    def success(self, states):
        return states[0][:, 0] > np.array(self.goals)[states[1]]


def executed(policy, *, execute, steps, rows=2):
    """The actions [b, steps, 2] that a policy carries out."""
    seen = []
    keys = jax.random.split(jax.random.key(0), rows)
    tasks = np.zeros(rows, int)
    rollout(
        policy, Follow(), keys, tasks, execute=execute, max_steps=steps, watch=lambda states, _: seen.append(states[0])
    )
    assert len(seen) == steps + 1 and (seen[0] == START).all()
    return np.stack(seen[1:], axis=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Follower(Robot):
    """The model sees the first dim relative to the state, and the second as it is."""

    action_names = ("x_m", "y_m")
    state_names = ("x_m", "y_m")
    control_hz = 1.0
    delta_mask = (True, False)

    def read(self, columns, episode_ends):
        raise AssertionError("there is no dataset")


def translation(window: WindowShape) -> Translation:
    """From `Follower` to a model of three dims: states stay as they are, actions are normalised, zeros fill up."""
    none = np.full(2, np.nan)
    state = NormStats(mean=np.zeros(2), std=np.ones(2), q01=none, q99=none)
    stats = {"state": state, "actions": NormStats(mean=MEAN, std=STD, q01=none, q99=none)}
    return Translation(
        robot=Follower(),
        normalize=Normalize(stats, "z_score"),
        transforms=(NoPrompt(), lambda row: row | {"state": np.pad(row["state"], (0, MODEL_DIMS - 2))}),
        spec={"state": ((MODEL_DIMS,), "float32"), "prompt_tokens": ((0,), "int32"), "prompt_mask": ((0,), "bool")},
        window=window,
    )


def in_the_models_units(actions, state):
    """Actions [h, 2] of `Follower` as its model says them, from a state [2]."""
    return (actions - np.array([state[0], 0.0]) - MEAN) / STD
