"""`GymEnv`: any Gymnasium environment with continuous actions, by its id or by a function of yours.

An observation is an array (the state), or a dictionary of arrays: vectors are the state, in the order of their names;
uint8 arrays [height, width, 3] are pictures, their names the cameras. Simulators cannot go back, so only the newest
states of a batch can be stepped. Read next: `in_processes.py`, which runs simulators in processes.
"""

import dataclasses
import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from openpi_train.envs import maniskill
from openpi_train.envs.env import Env, EnvObservation
from openpi_train.envs.env_pool import Leased, add_idle, numbers_of
from openpi_train.fields import at_least
from openpi_train.runtime.exits import UsageError
from openpi_train.runtime.own_file import import_file, told_of_file

# What the source of a task of ManiSkill begins with.
MANISKILL = "maniskill:"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GymEnv(Env):
    """One task: a Gymnasium environment. Its action bounds apply: actions beyond them are clipped."""

    # An id that Gymnasium knows, such as Pusher-v5; file.py:function, which returns an environment; or maniskill:ID, a
    # task of ManiSkill.
    source: str
    # The instruction that a policy gets.
    prompt: str = ""
    # The entry of Gymnasium's `info` that says whether the episode has succeeded; or "terminated": it succeeds where it
    # ends by itself.
    success_entry: str = "is_success"
    # Control steps after which an episode counts as failed.
    step_limit: int = at_least(1, 100)
    # Control steps per second.
    rate_hz: float = 10.0

    @property
    def cameras(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return tuple(_sizes(self.source).cameras)

    @property
    def action_dim(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return len(_sizes(self.source).low)

    @property
    def state_dim(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return _sizes(self.source).state_dim

    @property
    def control_hz(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.rate_hz

    @property
    def max_steps(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.step_limit

    has_reward: ClassVar[bool] = True

    @property
    def tasks(self) -> tuple[str, ...]:
        if self.source.startswith(MANISKILL):
            return (self.source.removeprefix(MANISKILL),)
        return (Path(self.source.rpartition(":")[0]).stem or self.source,)

    def instruction(self, task: int) -> str:
        del task
        return self.prompt

    def reset(self, keys: Key[Array, " b"], tasks: Int[Array | np.ndarray, " b"]) -> "GymEpisodes":
        """New episodes, each seeded by its key. Raises UsageError if there is none that fits."""
        simulators = Leased(_made, [(self.source,)] * len(tasks))
        pairs = zip(simulators, numbers_of(keys), strict=True)
        # Gymnasium's seeds are below 2**32.
        seen = [one.reset(seed=int(seed % 2**32))[0] for one, seed in pairs]
        no = np.zeros(len(seen), bool)
        return GymEpisodes(simulators, seen, no, no, np.zeros(len(seen)), 0)

    def step(self, states: "GymEpisodes", actions: Float[Array | np.ndarray, "b a"]) -> "GymEpisodes":
        """The states one control step later; episodes that are over stay as they are.

        Raises RuntimeError for states that were already stepped, UsageError if nothing says whether it succeeded.
        """
        states.simulators.check_newest(states.num_steps)
        seen = list(states.observations)
        success, over, rewards = states.success.copy(), states.over.copy(), np.zeros(len(seen))
        clipped = self.executed(actions)
        for row in np.flatnonzero(~states.over):
            simulator = states.simulators[row]
            seen[row], rewards[row], terminated, truncated, told = simulator.step(clipped[row])
            success[row] = self._succeeded(terminated, told)
            over[row] = success[row] or terminated or truncated
        states.simulators.num_steps += 1
        return GymEpisodes(states.simulators, seen, success, over, rewards, states.num_steps + 1)

    def require(self) -> None:
        file = self.source.rpartition(":")[0]
        package = "mani_skill" if self.source.startswith(MANISKILL) else "gymnasium"
        if file.endswith(".py"):
            _require_file(self.source, Path(file))
        elif importlib.util.find_spec(package) is None:
            raise UsageError(f"gym:{self.source}: the run acts in it, and it is missing: pip install {package}")

    def executed(self, actions: Float[Array | np.ndarray, "b a"]) -> Float[np.ndarray, "b a"]:
        """Within the action space's bounds."""
        sizes = _sizes(self.source)
        return np.clip(np.asarray(actions, np.float32), sizes.low, sizes.high)

    def observe(self, states: "GymEpisodes") -> EnvObservation:
        sizes, count = _sizes(self.source), len(states.success)
        parts = [as_dictionary(one) for one in states.observations]
        vectors = [[np.ravel(part[name]) for name in sizes.vectors] for part in parts]
        return EnvObservation(
            images={name: np.stack([part[name] for part in parts]) for name in sizes.cameras},
            state=np.stack([np.concatenate(one) for one in vectors]).astype(np.float32),
            task=np.zeros(count, np.int32),
        )

    def success(self, states: "GymEpisodes") -> Bool[np.ndarray, " b"]:
        return states.success

    def reward(self, states: "GymEpisodes") -> Float[np.ndarray, " b"]:
        """Gymnasium's; 0 where an episode is over."""
        return states.rewards

    def _succeeded(self, terminated: bool, told: Mapping[str, object]) -> bool:
        if self.success_entry == "terminated":
            return bool(terminated)
        if self.success_entry not in told:
            raise UsageError(
                f"{self.source}: its info has no entry {self.success_entry!r} (it has {', '.join(told) or 'none'}): "
                'set success_entry to the one that says so, or to "terminated" if it ends with success only'
            )
        return bool(told[self.success_entry])


@dataclasses.dataclass(frozen=True)
class GymEpisodes:
    """A batch of episodes after `num_steps` control steps: what each simulator said last."""

    simulators: Leased
    observations: list[Any]
    success: np.ndarray
    over: np.ndarray
    rewards: np.ndarray
    num_steps: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sizes:
    """What an environment takes and gives."""

    low: np.ndarray
    high: np.ndarray
    state_dim: int
    vectors: tuple[str, ...]
    cameras: tuple[str, ...]


def as_dictionary(observation: object) -> Mapping[str, np.ndarray]:
    """An observation by name; an array alone is called state."""
    return observation if isinstance(observation, Mapping) else {"state": np.asarray(observation)}


def _made(source: str) -> Any:
    """A new simulator. Raises UsageError if there is none of this name."""
    if source.startswith(MANISKILL):
        return maniskill.simulator(source.removeprefix(MANISKILL))
    file, _, function = source.rpartition(":")
    if file.endswith(".py"):
        _require_file(source, Path(file))
        make = getattr(import_file(Path(file), "the file of the environment"), function, None)
        if not callable(make):
            raise UsageError(f"gym:{source}: {file} has no function {function!r} that makes an environment")
        with told_of_file(Path(file), "the file of the environment"):
            return make()
    try:
        import gymnasium
    except ImportError as error:
        raise UsageError(f"gym:{source}: Gymnasium is missing ({error}): pip install gymnasium") from error
    try:
        return gymnasium.make(source)
    except gymnasium.error.Error as error:
        raise UsageError(f"gym:{source}: {error}") from error


def _require_file(source: str, file: Path) -> None:
    if not file.is_file():
        raise UsageError(f"gym:{source}: there is no file {file} (looked in {Path.cwd()})")


@functools.cache
def _sizes(source: str) -> _Sizes:
    """The sizes of an environment, of which one is made. Raises UsageError if no policy can act in it."""
    simulator = _made(source)
    low, high = (getattr(simulator.action_space, name, None) for name in ("low", "high"))
    if low is None or high is None or np.ndim(low) != 1:
        raise UsageError(f"gym:{source}: its actions are {simulator.action_space}; needed is a Box of one axis")
    seen = as_dictionary(simulator.reset(seed=0)[0])
    pictures = {name for name, one in seen.items() if np.ndim(one) == 3 and np.asarray(one).dtype == np.uint8}
    vectors = tuple(sorted(name for name, one in seen.items() if np.ndim(one) == 1))
    if not vectors:
        shapes = ", ".join(f"{name} {np.shape(one)}" for name, one in seen.items())
        raise UsageError(f"gym:{source}: its observation has no vector for the state: {shapes}")
    add_idle(_made, (source,), simulator)
    dims = sum(np.size(seen[name]) for name in vectors)
    return _Sizes(low=low, high=high, state_dim=dims, vectors=vectors, cameras=tuple(sorted(pictures)))
