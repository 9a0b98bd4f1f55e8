"""LIBERO (Liu et al. 2023): suites of tasks of a Franka arm in MuJoCo, where the package `libero` is installed.

What is observed is what openpi's `pi0_libero` and `physical-intelligence/libero` on the hub have: both cameras turned
by 180 degrees, and position, axis-angle rotation and fingers as the state. Interface and names as in LIBERO at revision
4f0dd18 (`benchmark/__init__.py`, `envs/env_wrapper.py`), limits and the first control steps as in openpi's
`examples/libero/main.py`. Read next: `robots/libero.py`, `in_processes.py`, in which it runs with `--env libero:SUITE`.

An evaluation begins in one of the initial states that LIBERO publishes for a task, which the key chooses; RL
begins in states that LIBERO draws anew. An episode ends with its first success.
"""

import dataclasses
import functools
import importlib
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from openpi_train.envs.env import Env, EnvObservation
from openpi_train.envs.env_pool import Leased, numbers_of
from openpi_train.envs.unattended import answering, choose_renderer
from openpi_train.runtime.exits import UsageError

# Control steps of each suite, somewhat more than its longest demonstration has.
SUITES = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
# LIBERO's name of each camera's picture.
_PICTURES = {"image": "agentview_image", "wrist_image": "robot0_eye_in_hand_image"}
# At first objects fall: nothing is moved for so many control steps, and the gripper is open.
_WAITING_STEPS, _NO_MOTION = 10, np.array([0.0] * 6 + [-1.0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class LiberoEnv(Env):
    """A suite of LIBERO."""

    # libero_spatial, libero_object, libero_goal, libero_10 or libero_90.
    suite: str = "libero_spatial"
    # Height and width of the pictures; those of the published demonstrations have 256.
    image_size: int = 256
    # Published initial states, or new ones, which demonstrations and RL have.
    initial_states: Literal["published", "new"] = "published"

    cameras: ClassVar[tuple[str, ...]] = tuple(_PICTURES)
    # LeRobot's name; the other is openpi's.
    also_called: ClassVar[Mapping[str, str]] = {"image2": "wrist_image"}
    # openpi's `examples/libero/main.py`.
    replan_steps: ClassVar[int | None] = 5
    # 0.63 to 0.87, rendered in software.
    simulator_gib: ClassVar[float | None] = 0.7
    action_dim: ClassVar[int] = 7
    state_dim: ClassVar[int] = 8
    control_hz: ClassVar[float] = 20.0

    def __post_init__(self):
        if self.suite not in SUITES:
            raise ValueError(f"LIBERO has no suite {self.suite!r}; it has {', '.join(SUITES)}")

    @property
    def name(self) -> str:
        return self.suite

    @property
    def max_steps(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return SUITES[self.suite]

    def require(self) -> None:
        _ = self.tasks

    @property
    def tasks(self) -> tuple[str, ...]:
        """LIBERO's names, in its order. Raises UsageError, as everything below does, if LIBERO is not installed."""
        return tuple(task.name for task in _tasks(self.suite))

    def instruction(self, task: int) -> str:
        return str(_tasks(self.suite)[task].language)

    def reset(self, keys: Key[Array, " b"], tasks: Int[Array | np.ndarray, " b"]) -> "LiberoEpisodes":
        """New episodes, after the control steps in which objects fall."""
        tasks = np.asarray(tasks, np.int32)
        simulators = Leased(_simulator, [(self.suite, int(task), self.image_size) for task in tasks])
        pairs = zip(simulators, numbers_of(keys).tolist(), tasks.tolist(), strict=True)
        seen = [self._begun(simulator, int(number), int(task)) for simulator, number, task in pairs]
        return LiberoEpisodes(simulators, seen, np.zeros(len(seen), bool), tasks, 0)

    def step(self, states: "LiberoEpisodes", actions: Float[Array | np.ndarray, "b 7"]) -> "LiberoEpisodes":
        """The states one control step later; episodes that have succeeded stay as they are.

        Raises RuntimeError for states that were already stepped.
        """
        states.simulators.check_newest(states.num_steps)
        executed, seen, success = self.executed(actions), list(states.seen), states.success.copy()
        for row in np.flatnonzero(~success):
            seen[row] = states.simulators[row].step(executed[row])[0]
            success[row] = bool(states.simulators[row].check_success())
        states.simulators.num_steps += 1
        return dataclasses.replace(states, seen=seen, success=success, num_steps=states.num_steps + 1)

    def executed(self, actions: Float[Array | np.ndarray, "b 7"]) -> Float[np.ndarray, "b 7"]:
        """Within -1..1, the range of the arm's controller."""
        return np.clip(np.asarray(actions, np.float64), -1.0, 1.0)

    def observe(self, states: "LiberoEpisodes") -> EnvObservation:
        return EnvObservation(
            images={
                # Turned by 180 degrees, as in the published demonstrations.
                camera: np.stack([np.asarray(seen[name], np.uint8)[::-1, ::-1] for seen in states.seen])
                for camera, name in _PICTURES.items()
            },
            state=np.stack([_proprioception(seen) for seen in states.seen]),
            task=states.tasks,
        )

    def success(self, states: "LiberoEpisodes") -> Bool[np.ndarray, " b"]:
        return states.success

    def for_demonstrations(self) -> "LiberoEnv":
        return dataclasses.replace(self, initial_states="new")

    def _begun(self, simulator: Any, number: int, task: int) -> Any:
        """What is seen at the beginning of the episode of this number."""
        # LIBERO draws from numpy's global generator, which belongs to others, too.
        kept = np.random.get_state()
        try:
            simulator.seed(number % 2**32)
            simulator.reset()
        finally:
            np.random.set_state(kept)
        if self.initial_states == "published":
            states = _published_states(self.suite, task)
            simulator.set_init_state(states[number % len(states)])
        seen = None
        for _ in range(_WAITING_STEPS):
            seen = simulator.step(_NO_MOTION)[0]
        return seen


@dataclasses.dataclass(frozen=True)
class LiberoEpisodes:
    """A batch of episodes after `num_steps` control steps: what each simulator said last."""

    simulators: Leased
    seen: list[Any]
    success: np.ndarray
    tasks: np.ndarray
    num_steps: int


def _proprioception(seen: Any) -> Float[np.ndarray, "8"]:
    """Position (m), rotation (axis times angle, rad) and both fingers (m)."""
    parts = seen["robot0_eef_pos"], axis_angle(np.asarray(seen["robot0_eef_quat"])), seen["robot0_gripper_qpos"]
    return np.concatenate([np.asarray(part) for part in parts]).astype(np.float32)


def axis_angle(quaternion: Float[np.ndarray, "4"]) -> Float[np.ndarray, "3"]:
    """The rotation of a unit quaternion x, y, z, w: its axis times its angle, 0 to 2 pi as robosuite has it."""
    cosine = float(np.clip(quaternion[3], -1.0, 1.0))
    sine = float(np.sqrt(1.0 - cosine**2))
    return np.zeros(3) if np.isclose(sine, 0.0, atol=1e-9) else quaternion[:3] * (2 * np.arccos(cosine) / sine)


@functools.cache
def _tasks(suite: str) -> tuple[Any, ...]:
    """LIBERO's description of each task."""
    found = _benchmark(suite)
    return tuple(found.get_task(number) for number in range(found.n_tasks))


@functools.cache
def _benchmark(suite: str) -> Any:
    return _libero("benchmark").get_benchmark_dict()[suite]()


@functools.cache
def _published_states(suite: str, task: int) -> Any:
    """The initial states of a task, [n, s]."""
    try:
        return _benchmark(suite).get_task_init_states(task)
    except pickle.UnpicklingError:
        # torch 2.6 and later refuse the file, which has numpy arrays, unless told to trust it as LIBERO does.
        return importlib.import_module("torch").load(_path("init_states", suite, task), weights_only=False)


def _simulator(suite: str, task: int, size: int) -> Any:
    """A new simulator of this task."""
    make = _libero("envs").OffScreenRenderEnv
    return make(bddl_file_name=_path("bddl_files", suite, task), camera_heights=size, camera_widths=size)


def _path(what: str, suite: str, task: int) -> str:
    """A task's file of this kind, one of LIBERO's names of its folders."""
    one = _tasks(suite)[task]
    name = one.bddl_file if what == "bddl_files" else one.init_states_file
    return str(Path(_libero("").get_libero_path(what)) / one.problem_folder / name)


def _libero(module: str) -> Any:
    """A module of LIBERO. Where it asks for the folder of its files when it is first imported: its own.

    Raises UsageError if there is none.
    """
    choose_renderer()
    name = f"libero.libero.{module}".removesuffix(".")
    try:
        with answering("n"):
            return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"LIBERO cannot be imported ({error}): pip install 'openpi_train[libero]'") from error
