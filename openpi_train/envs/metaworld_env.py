"""Meta-World (Yu et al. 2019): fifty tasks of a Sawyer arm in MuJoCo, each with a scripted expert; the extra `sim`.

Goals are observable, as in its multi-task benchmarks. Initial states are drawn from Meta-World's own ranges, and an
episode ends with its first success: further steps do not change it. Read next: `metaworld_render.py` for its pictures.

MuJoCo's states cannot be restored exactly: the same actions from a restored state diverge (by 0.5 after 40 steps with
metaworld 3.1.1), so only the newest states of a batch can be stepped. From `reset` on, episodes are deterministic
functions of their keys and actions, bit for bit.
"""

import dataclasses
import functools
import importlib.util
import logging
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from openpi_train.envs.env import Env, EnvObservation
from openpi_train.envs.env_pool import Leased
from openpi_train.envs.metaworld_tasks import INSTRUCTIONS
from openpi_train.runtime.exits import UsageError

logger = logging.getLogger(__name__)

CAMERA = "corner2"
# Height and width of the pictures in videos.
SHOWN_PX = 240
# Noise on an expert's actions, in units of the action's range: disturbances that its commands correct.
_NOISE = np.array([0.1, 0.1, 0.1, 0.0])


@dataclasses.dataclass(frozen=True)
class Episodes:
    """A batch of running episodes: Meta-World's observation of each, float64 [b, 39], the number of steps, and what the
    last one was rewarded with.
    """

    simulators: Leased
    observations: np.ndarray
    success: np.ndarray
    num_steps: np.ndarray
    rewards: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetaWorldEnv(Env):
    """Meta-World as an environment. Observes states, and with an `image_size` also a picture."""

    # Meta-World's names without their version, such as drawer-close.
    task_list: tuple[str, ...] = ("reach", "button-press", "drawer-close", "window-open", "push")
    # Height and width of the picture; None: no picture, and no OpenGL needed.
    image_size: int | None = None
    # Split of initial states; the two are disjoint, and demonstrations use `train`.
    split: Literal["train", "held_out"] = "held_out"

    action_dim: ClassVar[int] = 4
    state_dim: ClassVar[int] = 39
    control_hz: ClassVar[float] = 80.0
    max_steps: ClassVar[int] = 500
    # With a picture; without, less.
    simulator_gib: ClassVar[float | None] = 0.03
    has_reward: ClassVar[bool] = True
    has_expert: ClassVar[bool] = True

    def __post_init__(self):
        if unknown := [name for name in self.task_list if name not in INSTRUCTIONS]:
            raise ValueError(f"Meta-World has no task {', '.join(unknown)}; it has {', '.join(INSTRUCTIONS)}")
        if not self.task_list:
            raise ValueError("task_list is empty; give at least one of Meta-World's tasks")

    @property
    def cameras(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """One camera that views the table from a corner, if there are pictures."""
        return () if self.image_size is None else (CAMERA,)

    @property
    def tasks(self) -> tuple[str, ...]:
        return self.task_list

    def instruction(self, task: int) -> str:
        return INSTRUCTIONS[self.task_list[task]]

    def reset(self, keys: Key[Array, " b"], tasks: Int[Array | np.ndarray, " b"]) -> Episodes:
        """New episodes. Raises ImportError if Meta-World is not installed."""
        numbers = np.asarray(jax.random.key_data(keys))
        simulators = Leased(_Simulator, [(self.task_list[int(task)],) for task in np.asarray(tasks)])
        side = ("train", "held_out").index(self.split)
        pairs = zip(simulators, numbers.tolist(), strict=True)
        observations = np.stack([simulator.reset([*number, side]) for simulator, number in pairs])
        count = len(simulators)
        return Episodes(simulators, observations, np.zeros(count, bool), np.zeros(count, int), np.zeros(count))

    def step(self, states: Episodes, actions: Float[Array | np.ndarray, "b 4"]) -> Episodes:
        """The states one control step later. Raises RuntimeError for states that were already stepped."""
        _check_newest(states)
        actions = self.executed(actions)
        observations, success = states.observations.copy(), states.success.copy()
        rewards = np.zeros(len(success))
        for row in np.flatnonzero(~success):
            observations[row], success[row], rewards[row] = states.simulators[row].step(actions[row])
        return Episodes(states.simulators, observations, success, states.num_steps + ~states.success, rewards)

    def executed(self, actions: Float[Array | np.ndarray, "b 4"]) -> Float[np.ndarray, "b 4"]:
        """Within -1..1."""
        return np.clip(np.asarray(actions, np.float64), -1.0, 1.0)

    def observe(self, states: Episodes) -> EnvObservation:
        """Meta-World's 39 numbers (hand, gripper and objects now and one step ago, and the goal) and the picture."""
        images = {} if self.image_size is None else self._drawn(states, np.arange(len(states.success)), self.image_size)
        return EnvObservation(
            images=images,
            state=np.asarray(states.observations, np.float32),
            task=np.array([self.task_list.index(simulator.name) for simulator in states.simulators], np.int32),
        )

    def pictures(self, states: Episodes, rows: np.ndarray) -> Mapping[str, np.ndarray]:
        """The view from the corner, also for an environment without cameras; empty if rendering is impossible."""
        if self.image_size is None and _tell_why_not():
            return {}
        return self._drawn(states, rows, self.image_size or SHOWN_PX)

    def _drawn(self, states: Episodes, rows: np.ndarray, size: int) -> dict[str, np.ndarray]:
        _check_newest(states)
        return {CAMERA: np.stack([states.simulators[row].picture(size) for row in rows.tolist()])}

    def success(self, states: Episodes) -> Bool[np.ndarray, " b"]:
        """Whether Meta-World has reported a success so far."""
        return states.success

    def reward(self, states: Episodes) -> Float[np.ndarray, " b"]:
        """Meta-World's own, from 0 to 10; 0 after the first success."""
        return states.rewards

    def require(self) -> None:
        if importlib.util.find_spec("metaworld") is None:
            raise UsageError("Meta-World is not installed, and the run acts in it: pip install 'openpi_train[sim]'")

    def for_demonstrations(self) -> "MetaWorldEnv":
        return dataclasses.replace(self, split="train")

    def demonstrate(
        self, states: Episodes, keys: Key[Array, " b"]
    ) -> tuple[Float[np.ndarray, "b 4"], Float[np.ndarray, "b 4"]]:
        """The commands of Meta-World's scripted policies, and the same with noise on the motion."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # it warns that commands must be clipped, as they are here
            found = [s.expert.get_action(o) for s, o in zip(states.simulators, states.observations, strict=True)]
        commands = np.clip(np.stack(found), -1.0, 1.0).astype(np.float32)
        noise = jax.vmap(lambda key: jax.random.normal(key, (4,)))(keys)
        return commands, np.clip(commands + np.asarray(noise) * _NOISE, -1.0, 1.0).astype(np.float32)


def with_all_tasks(**fields: Any) -> MetaWorldEnv:
    """Meta-World with all its fifty tasks."""
    return MetaWorldEnv(task_list=tuple(INSTRUCTIONS), **fields)


class _Simulator:
    """One of Meta-World's environments and its scripted policy."""

    def __init__(self, name: str):
        self.name, self.num_steps = name, 0
        self.view: Any = None
        try:
            environments = importlib.import_module("metaworld.env_dict").ALL_V3_ENVIRONMENTS
            experts = importlib.import_module("metaworld.policies").ENV_POLICY_MAP
        except ImportError as error:
            raise ImportError(f"Meta-World cannot be imported ({error}): pip install 'openpi_train[sim]'") from error
        self.env: Any = environments[f"{name}-v3"]()
        self.expert: Any = experts[f"{name}-v3"]()
        # `set_task` would set these for one of fifty pre-drawn states; here each reset draws a new one.
        self.env._set_task_called = self.env.seeded_rand_vec = True
        self.env._freeze_rand_vec = self.env._partially_observable = False
        self.env.__dict__.pop("sawyer_observation_space", None)  # cached, of unseen goals

    def reset(self, seed: list[int]) -> np.ndarray:
        """Start the episode drawn from `seed`; returns its first observation."""
        self.num_steps = 0
        self.env.np_random = np.random.default_rng(seed)
        return self.env.reset()[0]

    def step(self, action: np.ndarray) -> tuple[np.ndarray, bool, float]:
        """The next observation, whether it is a success, and the reward."""
        self.num_steps += 1
        observation, reward, _, _, told = self.env.step(action)
        return observation, bool(told["success"]), float(reward)

    def picture(self, size: int) -> np.ndarray:
        """The camera's picture, uint8 [size, size, 3]."""
        if self.view is None or self.view.size != size:
            from openpi_train.envs.metaworld_render import View

            self.view = View(self.env.model, CAMERA, size)
        return self.view.picture(self.env.data)


@functools.cache
def _tell_why_not() -> str:
    from openpi_train.envs.metaworld_render import why_not

    if problem := why_not():
        logger.warning("Meta-World renders no pictures: %s", problem)
    return problem


def _check_newest(states: Episodes) -> None:
    if any(s.num_steps != steps for s, steps in zip(states.simulators, states.num_steps.tolist(), strict=True)):
        raise RuntimeError(
            "these Meta-World states were already stepped, and a simulator cannot go back: keep the newest states, or "
            "reset with the same keys and execute the same actions"
        )
