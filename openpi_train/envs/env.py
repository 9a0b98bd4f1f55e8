"""Interface of all environments: batched episodes of named tasks with language instructions and binary success.

Read next: `tabletop_env.py` (the embedded one), `rollout.py` (runs a policy in any of them). An environment may be pure
JAX or wrap a simulator: its states are opaque to callers, and every method works on a whole batch of episodes.
"""

import abc
import dataclasses
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt8

from openpi_train.types import pytree

# The states of a batch of episodes: what an environment keeps of them, opaque to all others.
EnvStates = Any


@pytree
class EnvObservation:
    """The robot's observation in each episode of a batch, in the robot's own units.

    `images` is keyed by the names in `Env.cameras`; `task` indexes `Env.tasks`, whose instructions are the prompts. For
    a policy that sees several control steps, these are on an axis `o` after the batch axis, the present one last.
    """

    images: Mapping[str, UInt8[Array | np.ndarray, "b *o height width 3"]]
    state: Float[Array | np.ndarray, "b *o s"]
    task: Int[Array | np.ndarray, " b"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Env(abc.ABC):
    """An environment with tasks. Immutable; everything that changes is in the states that it returns."""

    # Image features of an observation, by the names that datasets of this environment use.
    cameras: ClassVar[tuple[str, ...]]
    action_dim: ClassVar[int]
    state_dim: ClassVar[int]
    # Control steps per second.
    control_hz: ClassVar[float]
    # Number of control steps after which an episode without success counts as failed.
    max_steps: ClassVar[int]
    # Other names of cameras, as datasets of this environment also have them, and the camera of each.
    also_called: ClassVar[Mapping[str, str]] = {}
    # Actions of a chunk that published evaluations execute before they look again; None: the policy's own number.
    replan_steps: ClassVar[int | None] = None
    # GiB of host memory that the simulator of an episode keeps: 0 where it has none, None where nobody knows.
    simulator_gib: ClassVar[float | None] = 0.0
    # Whether every control step has a `reward`.
    has_reward: ClassVar[bool] = False
    # Whether a scripted expert can `demonstrate` every task.
    has_expert: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """What messages and tables call it."""
        return type(self).__name__

    def camera_of(self, feature: str) -> str:
        """The camera for a dataset's image feature, such as `top` for observation.images.top; no camera if none is."""
        last = re.split(r"[./]", feature)[-1]
        names = [self.also_called.get(name, name) for name in (feature, feature.removeprefix("observation/"), last)]
        return next((name for name in names if name in self.cameras), last)

    @property
    @abc.abstractmethod
    def tasks(self) -> tuple[str, ...]:
        """A short name per task; a task's number is its index here."""

    @abc.abstractmethod
    def instruction(self, task: int) -> str:
        """The task's language instruction, as given to a policy; empty: the policy's own prompt is used."""

    @property
    def action_bounds(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The lowest and highest action [a] that the environment declares; None: it declares none."""
        return None

    def limited_to(self, max_steps: int) -> "Env":
        """This environment for episodes of so many control steps at most (default: itself, which need not know)."""
        del max_steps
        return self

    @abc.abstractmethod
    def reset(self, keys: Key[Array, " b"], tasks: Int[Array | np.ndarray, " b"]) -> EnvStates:
        """New episodes: each row's initial state depends only on its key and task, and is not yet a success."""

    @abc.abstractmethod
    def step(self, states: EnvStates, actions: Float[Array | np.ndarray, "b a"]) -> EnvStates:
        """The states one control step later."""

    def executed(self, actions: Float[Array | np.ndarray, "b a"]) -> Float[Array | np.ndarray, "b a"]:
        """What `step` carries out of these actions: within bounds, where the environment has some (default: all)."""
        return actions

    @abc.abstractmethod
    def observe(self, states: EnvStates) -> EnvObservation:
        """The current observation in each episode."""

    @abc.abstractmethod
    def success(self, states: EnvStates) -> Bool[Array | np.ndarray, " b"]:
        """Whether each episode has reached its task's goal, computed from the state and not from pictures."""

    def reward(self, states: EnvStates) -> Float[Array | np.ndarray, " b"]:
        """The reward of the last control step in each episode, which says more than success. Only with `has_reward`."""
        raise NotImplementedError(f"{type(self).__name__} has no rewards")

    def require(self) -> None:  # noqa: B027
        """Raise UsageError for a package or file that the episodes need and that is not there (default: none is)."""

    def for_demonstrations(self) -> "Env":
        """This environment with initial states that evaluations do not use (default: itself; only keys differ)."""
        return self

    def demonstrate(
        self, states: EnvStates, keys: Key[Array, " b"]
    ) -> tuple[Float[Array | np.ndarray, "b a"], Float[Array | np.ndarray, "b a"]]:
        """The scripted expert's command in each episode, and the action to execute: the command with noise from `keys`.

        So the commands show how to recover from states to which a policy's own errors lead. Only with `has_expert`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no scripted expert")

    def pictures(self, states: EnvStates, rows: np.ndarray) -> Mapping[str, np.ndarray]:
        """Pictures of these rows for videos, uint8 [rows, height, width, 3] by camera.

        By default what the policy sees; environments without cameras may render too. Empty if it is impossible.
        """
        images = self.observe(states).images
        return {name: np.asarray(image)[rows] for name, image in images.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoEnv(Env):
    """An environment without tasks, for runs that are not evaluated in one."""

    cameras: ClassVar[tuple[str, ...]] = ()
    action_dim: ClassVar[int] = 0
    state_dim: ClassVar[int] = 0
    control_hz: ClassVar[float] = 1.0
    max_steps: ClassVar[int] = 0

    @property
    def tasks(self) -> tuple[str, ...]:
        return ()

    def _nothing(self, *args: object, **kwargs: object) -> Any:
        raise ValueError("there is no environment: give the experiment one in eval.closed_loop.env")

    instruction = reset = step = observe = success = _nothing
