"""What every environment promises: batched episodes of named tasks, told in words and judged by a binary success.

Read next: `tabletop_env.py` (the embedded one), `rollout.py` (runs a policy in any of them). An environment may be pure
JAX or wrap a simulator: its states are opaque to callers, and every method works on a whole batch of episodes.
"""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt8

from openpi_train.types import pytree


@pytree
class EnvObservation:
    """What the robot sees and feels in each episode of a batch, in the robot's own units.

    `images` is keyed by the names in `Env.cameras`; `task` indexes `Env.tasks`, whose words are the prompt. A policy
    that sees several control steps is given them on an axis `o` behind the rows', the present one last.
    """

    images: Mapping[str, UInt8[Array | np.ndarray, "b *o height width 3"]]
    state: Float[Array | np.ndarray, "b *o s"]
    task: Int[Array | np.ndarray, " b"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Env(abc.ABC):
    """A world with tasks. A frozen value; everything that changes is in the states it hands out."""

    # Image features of an observation, by the names that datasets of this environment use.
    cameras: ClassVar[tuple[str, ...]]
    action_dim: ClassVar[int]
    state_dim: ClassVar[int]
    # Control steps per second.
    control_hz: ClassVar[float]
    # Control steps after which an episode that has not succeeded counts as failed.
    max_steps: ClassVar[int]
    # Whether there is a scripted expert that can `demonstrate` every task.
    has_expert: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def tasks(self) -> tuple[str, ...]:
        """A short name per task; a task's number is its place here."""

    @abc.abstractmethod
    def instruction(self, task: int) -> str:
        """The task in words, as a policy is told."""

    @abc.abstractmethod
    def reset(self, keys: Key[Array, " b"], tasks: Int[Array | np.ndarray, " b"]) -> Any:
        """Fresh episodes: each row's initial state is a function of its key and task alone, and not yet a success."""

    @abc.abstractmethod
    def step(self, states: Any, actions: Float[Array | np.ndarray, "b a"]) -> Any:
        """The states one control step later."""

    @abc.abstractmethod
    def observe(self, states: Any) -> EnvObservation:
        """What each episode's robot sees now."""

    @abc.abstractmethod
    def success(self, states: Any) -> Bool[Array | np.ndarray, " b"]:
        """Whether each episode has reached its task's goal, judged on the world itself and not on pictures."""

    def for_demonstrations(self) -> "Env":
        """This environment with initial states that are kept out of evaluations (default: the same, of other keys)."""
        return self

    def demonstrate(
        self, states: Any, keys: Key[Array, " b"]
    ) -> tuple[Float[Array | np.ndarray, "b a"], Float[Array | np.ndarray, "b a"]]:
        """What a scripted expert commands in each episode, and what is to be carried out: that, disturbed by the keys.

        So the commands show how to come back from where a policy's own errors lead.
        """
        raise NotImplementedError(f"{type(self).__name__} has no scripted expert")

    def pictures(self, states: Any, rows: np.ndarray) -> Mapping[str, np.ndarray]:
        """What a person is shown of these rows, for videos: uint8 [rows, height, width, 3] by camera.

        By default what the policy sees; worlds without cameras may draw, too. Nothing where nothing can be drawn.
        """
        images = self.observe(states).images
        return {name: np.asarray(image)[rows] for name, image in images.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoEnv(Env):
    """No world and no task: what a run has that is not evaluated in an environment."""

    cameras: ClassVar[tuple[str, ...]] = ()
    action_dim: ClassVar[int] = 0
    state_dim: ClassVar[int] = 0
    control_hz: ClassVar[float] = 1.0
    max_steps: ClassVar[int] = 0

    @property
    def tasks(self) -> tuple[str, ...]:
        """None."""
        return ()

    def instruction(self, task: int) -> str:
        """There is none."""
        raise self._nothing()

    def reset(self, keys: Key[Array, " b"], tasks: Int[Array | np.ndarray, " b"]) -> Any:
        """There is none."""
        raise self._nothing()

    def step(self, states: Any, actions: Float[Array | np.ndarray, "b a"]) -> Any:
        """There is none."""
        raise self._nothing()

    def observe(self, states: Any) -> EnvObservation:
        """There is none."""
        raise self._nothing()

    def success(self, states: Any) -> Bool[Array, " b"]:
        """There is none."""
        raise self._nothing()

    def _nothing(self) -> ValueError:
        return ValueError("there is no environment: give the experiment one in eval.closed_loop.env")
