"""`GymEnv`: any Gymnasium environment with continuous actions, by its id or by a function of yours.

An observation is an array (the state), or a dictionary of arrays, nested too: numbers and vectors are the state, in the
order of their names; pictures are the cameras. What the environment says of itself is used: its limit of time, its
rate, and its instruction. Simulators cannot go back, so only the newest states of a batch can be stepped. Read next:
`gym_source.py`, `in_processes.py`, which runs simulators in processes.
"""

import dataclasses
import functools
import logging
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from openpi_train.envs import gym_experts, maniskill_experts
from openpi_train.envs.env import Env, EnvObservation
from openpi_train.envs.env_pool import Leased, numbers_of
from openpi_train.envs.gym_observation import entries, is_picture, picture
from openpi_train.envs.gym_source import GymSource
from openpi_train.fields import at_least
from openpi_train.runtime.exits import UsageError

logger = logging.getLogger(__name__)

# Where an environment says nothing.
_MAX_STEPS, _CONTROL_HZ = 100, 10.0
# Entries of Gymnasium's `info` that say whether an episode has succeeded, as packages name them.
_SUCCESS = ("is_success", "success")
# Where LeRobot's environments have their pictures.
_PIXELS = "pixels"
# By source.
_EXPERTS = {**gym_experts.EXPERTS, **maniskill_experts.EXPERTS}
# Noise on an expert's actions, as a share of what they may be: disturbances that its commands correct.
_NOISE = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class GymEnv(Env):
    """One task: a Gymnasium environment. Actions are given to it as they are; what it does with those beyond its bounds
    is its own affair, unless `clip` is set.
    """

    # An id that Gymnasium knows, such as Pusher-v5 or gym_pusht/PushT-v0; MODULE:ID; file.py:function, which returns an
    # environment; or maniskill:ID, a task of ManiSkill.
    source: str
    # Arguments of the function or of gymnasium.make, each as NAME=VALUE.
    make: tuple[str, ...] = ()
    # The instruction that a policy gets; None: the environment's own, its attribute `task_description`. If that is
    # missing, too, the policy's own prompt is used.
    prompt: str | None = None
    # The entry of Gymnasium's `info` that says whether the episode has succeeded (None: is_success or success); or
    # "terminated": it succeeds where it ends by itself.
    success_entry: str | None = None
    # Whether an episode succeeds at any control step, or only if it has succeeded at its last one.
    success_at: Literal["any", "last"] = "any"
    # Control steps after which an episode counts as failed; None: the environment's own limit, or 100.
    step_limit: int | None = at_least(1, None)
    # Control steps per second; None: the environment's `render_fps`, or 10.
    rate_hz: float | None = None
    # Entries of the observation that are the state, in this order; None: all numbers and vectors, by name.
    state_entries: tuple[str, ...] | None = None
    # Names of cameras in place of the observation's, each as NAME=ENTRY.
    camera_names: tuple[str, ...] = ()
    # Clip actions to the bounds that the environment declares.
    clip: bool = False

    @property
    def name(self) -> str:
        return self.source

    @property
    def cameras(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return tuple(self._about.cameras)

    @property
    def action_dim(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return len(self._about.low)

    @property
    def state_dim(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._about.state_dim

    @property
    def control_hz(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.rate_hz or self._about.control_hz

    @property
    def max_steps(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.step_limit or self._about.max_steps

    has_reward: ClassVar[bool] = True
    simulator_gib: ClassVar[float | None] = None

    @property
    def has_expert(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.source in _EXPERTS

    @property
    def tasks(self) -> tuple[str, ...]:
        return (self._source.task,)

    def instruction(self, task: int) -> str:
        del task
        return self._about.prompt if self.prompt is None else self.prompt

    @property
    def action_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        return self._about.low, self._about.high

    def limited_to(self, max_steps: int) -> "GymEnv":
        return dataclasses.replace(self, step_limit=max_steps)

    def reset(self, keys: Key[Array, " b"], tasks: Int[Array | np.ndarray, " b"]) -> "GymEpisodes":
        """New episodes, each seeded by its key. Raises UsageError if there is none that fits."""
        simulators = Leased(_made, [(self._source,)] * len(tasks))
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
        given, is_last = self.executed(actions), states.num_steps + 1 >= self.max_steps
        for row in np.flatnonzero(~states.over):
            simulator = states.simulators[row]
            seen[row], rewards[row], terminated, truncated, told = simulator.step(given[row])
            ended = bool(terminated or truncated)
            counts = self.success_at == "any" or ended or is_last
            success[row] = counts and _succeeded(self._source, self.success_entry, terminated, told)
            over[row] = success[row] or ended
        states.simulators.num_steps += 1
        return GymEpisodes(states.simulators, seen, success, over, rewards, states.num_steps + 1)

    def require(self) -> None:
        self._source.require()

    def executed(self, actions: Float[Array | np.ndarray, "b a"]) -> Float[np.ndarray, "b a"]:
        """As they are; with `clip` within the action space's bounds."""
        given = np.asarray(actions, self._about.dtype)
        return np.clip(given, self._about.low, self._about.high) if self.clip else given

    def observe(self, states: "GymEpisodes") -> EnvObservation:
        about, parts = self._about, [entries(one) for one in states.observations]
        vectors = [[np.ravel(part[name]) for name in about.vectors] for part in parts]
        return EnvObservation(
            images={name: np.stack([picture(part[entry]) for part in parts]) for name, entry in about.cameras.items()},
            state=np.stack([np.concatenate(one) for one in vectors]).astype(np.float32),
            task=np.zeros(len(parts), np.int32),
        )

    def success(self, states: "GymEpisodes") -> Bool[np.ndarray, " b"]:
        return states.success

    def demonstrate(
        self, states: "GymEpisodes", keys: Key[Array, " b"]
    ) -> tuple[Float[np.ndarray, "b a"], Float[np.ndarray, "b a"]]:
        """The commands of the expert (`gym_experts.py`, `maniskill_experts.py`), and the same with noise on all dims
        that they use.
        """
        given = [
            getattr(simulator, "known", lambda seen=seen: seen)()
            for simulator, seen in zip(states.simulators, states.observations, strict=True)
        ]
        commands = np.stack([_EXPERTS[self.source](one) for one in given])
        noise = jax.vmap(lambda key: jax.random.normal(key, commands.shape[1:]))(keys)
        disturbed = np.where(commands == 0, 0, commands + _NOISE * np.asarray(noise))
        return commands, np.clip(disturbed, *self.action_bounds).astype(np.float32)

    def reward(self, states: "GymEpisodes") -> Float[np.ndarray, " b"]:
        """Gymnasium's; 0 where an episode is over."""
        return states.rewards

    @property
    def _source(self) -> GymSource:
        return GymSource(self.source, self.make)

    @property
    def _about(self) -> "_About":
        return _about(self._source, self.state_entries, self.camera_names, self.success_entry)


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
class _About:
    """What an environment takes, gives, and says of itself; `cameras` are its entries by name."""

    low: np.ndarray
    high: np.ndarray
    dtype: np.dtype[Any]
    state_dim: int
    vectors: tuple[str, ...]
    cameras: Mapping[str, str]
    prompt: str
    max_steps: int
    control_hz: float


def _made(source: GymSource) -> Any:
    return source.make()


@functools.cache
def _about(
    source: GymSource,
    state_entries: tuple[str, ...] | None,
    camera_names: tuple[str, ...],
    success_entry: str | None,
) -> _About:
    """The facts about an environment, of which one is made. Raises UsageError if no policy can act in it."""
    simulator = source.make()
    bounds = [getattr(simulator.action_space, name, None) for name in ("low", "high")]
    if any(one is None or np.ndim(one) != 1 for one in bounds):
        raise UsageError(f"gym:{source.name}: its actions are {simulator.action_space}; needed is a Box of one axis")
    low, high = (np.asarray(one) for one in bounds)
    seen = entries(simulator.reset(seed=0)[0])
    shapes = ", ".join(f"{name} {list(one.shape)}" for name, one in seen.items())
    vectors = _vectors(source, seen, state_entries, shapes)
    spec, inner = source.spec() or getattr(simulator, "spec", None), getattr(simulator, "unwrapped", simulator)
    rate = (getattr(simulator, "metadata", None) or {}).get("render_fps")
    action = np.clip(np.zeros(len(low)), low, high).astype(_dtype(simulator))
    _succeeded(source, success_entry, *simulator.step(action)[2::2])
    made = _About(
        low=low,
        high=high,
        dtype=_dtype(simulator),
        state_dim=sum(seen[name].size for name in vectors),
        vectors=vectors,
        cameras=_cameras(source, seen, camera_names, shapes),
        prompt=str(getattr(inner, "task_description", "") or ""),
        max_steps=getattr(spec, "max_episode_steps", None) or _MAX_STEPS,
        control_hz=float(rate or _CONTROL_HZ),
    )
    getattr(simulator, "close", lambda: None)()
    return made


def _dtype(simulator: Any) -> np.dtype[Any]:
    """That of its actions."""
    return np.dtype(getattr(simulator.action_space, "dtype", None) or np.float32)


def _succeeded(source: GymSource, entry: str | None, terminated: bool, told: Mapping[str, object]) -> bool:
    """Whether an episode has succeeded. Raises UsageError if `told`, Gymnasium's `info`, does not say so."""
    if entry == "terminated":
        return bool(terminated)
    wanted = _SUCCESS if entry is None else (entry,)
    name = next((name for name in wanted if name in told), None)
    if name is None:
        raise UsageError(
            f"gym:{source.name}: its info has no entry {' or '.join(map(repr, wanted))} (it has "
            f"{', '.join(told) or 'none'}): set --env.success to the one that says whether the episode has succeeded, "
            "or to terminated if it ends with success only"
        )
    return bool(np.asarray(told[name]).all())


def _vectors(
    source: GymSource, seen: Mapping[str, np.ndarray], wanted: tuple[str, ...] | None, shapes: str
) -> tuple[str, ...]:
    """The entries of the state."""
    numeric = sorted(name for name, one in seen.items() if one.ndim <= 1 and one.dtype.kind in "fiub")
    if not numeric:
        raise UsageError(f"gym:{source.name}: its observation has no vector for the state: {shapes}")
    for name in wanted or ():
        if name not in numeric:
            raise UsageError(f"gym:{source.name}: the state cannot have {name!r}; it can have {', '.join(numeric)}")
    chosen = tuple(numeric) if wanted is None else wanted
    if hidden := [name for name in numeric if "goal" in name and name not in chosen]:
        logger.warning("%s: the policy does not see %s: add it to --env.state", source.name, ", ".join(hidden))
    return chosen


def _cameras(
    source: GymSource, seen: Mapping[str, np.ndarray], names: tuple[str, ...], shapes: str
) -> Mapping[str, str]:
    """The entry of each camera, by name; warns about what is neither a picture nor part of the state."""
    pictures = [name for name, one in seen.items() if is_picture(one)]
    called = {entry: entry.removeprefix(f"{_PIXELS}/") for entry in pictures}
    for one in names:
        name, equals, entry = one.partition("=")
        matches = [full for full in pictures if equals and entry in (full, called[full])]
        if not matches:
            raise UsageError(
                f"gym:{source.name}: --env.cameras {one}: it is NAME=ENTRY, a picture of the observation, which has "
                f"{shapes}"
            )
        called[matches[0]] = name
    left_out = [name for name, one in seen.items() if one.ndim > 1 and name not in pictures]
    if left_out:
        logger.warning("%s: no picture and no vector, not seen by the policy: %s", source.name, ", ".join(left_out))
    return {name: entry for entry, name in sorted(called.items(), key=lambda pair: pair[1])}
