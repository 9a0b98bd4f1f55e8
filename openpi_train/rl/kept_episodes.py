"""`KeptEpisodes`: writes the episodes of RL as a LeRobot dataset, an iteration at a time.

An iteration that is made again, since the run was killed before its next save, replaces what it wrote. Keeping changes
nothing in the run: it only looks. Read next: `data/formats/lerobot/lerobot_parts.py`, `robot_actor.py`.

    next.reward    what the environment gave for the control step; without rewards of its own, 1 for success
    next.success   whether the control step achieved the task; True at most in the last one
    next.done      whether the episode ended with the control step: by success, or by the limit
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from openpi_train.data.core import image
from openpi_train.data.core.source import stored_name
from openpi_train.data.formats.lerobot.lerobot_parts import LeRobotParts
from openpi_train.envs.env import Env, EnvObservation, EnvStates
from openpi_train.json_object import JsonObject
from openpi_train.robots.robot import Robot
from openpi_train.runtime import agree
from openpi_train.runtime.exits import UsageError

_REWARD, _SUCCESS, _DONE = "next.reward", "next.success", "next.done"


class EpisodeRecorder:
    """The `record` of a rollout (`envs/rollout.py`): keeps what some of its episodes show.

    Args:
        rows: The episodes that are kept, by their row in the rollout.
        cameras: The environment's cameras.
    """

    def __init__(self, env: Env, rows: Sequence[int], cameras: Sequence[str]):
        self._env, self._cameras = env, cameras
        self._steps: dict[int, list[dict[str, Any]]] = {row: [] for row in rows}

    def __call__(self, seen: EnvObservation, actions: np.ndarray, states: EnvStates, was_over: np.ndarray) -> None:
        success = np.asarray(self._env.success(states))
        rewards = np.asarray(self._env.reward(states)) if self._env.has_reward else success
        executed = np.asarray(self._env.executed(actions))
        images = {camera: np.asarray(seen.images[camera]) for camera in self._cameras}
        state = np.asarray(seen.state)
        for row, steps in self._steps.items():
            if not was_over[row]:
                pictures = {camera: image.encode(one[row], "png") for camera, one in images.items()}
                step = {"state": state[row], "action": executed[row], "reward": rewards[row], "success": success[row]}
                steps.append({**step, "pictures": pictures})

    def episode(self, row: int) -> dict[str, list[Any]]:
        """By entry, a value for each control step of this episode."""
        steps = self._steps[row]
        return {name: [step[name] for step in steps] for name in steps[0]}


class KeptEpisodes:
    """The episodes of a run's RL in `folder`. Every process makes one, and writes the episodes that it acted in.

    Args:
        features: Image feature of the robot's datasets -> the environment's camera.
        tasks: The environment's tasks that it learns, by number.
        every: Keep those of every so many iterations.
        keep_failed: Whether to keep episodes without success.
        run: What the run is called; another run does not add to its dataset.

    Raises UsageError if nothing can be written there.
    """

    def __init__(
        self,
        folder: str,
        *,
        env: Env,
        robot: Robot,
        features: Mapping[str, str],
        tasks: Sequence[int],
        every: int,
        keep_failed: bool,
        run: JsonObject,
    ):
        self._env, self._every, self._keep_failed = env, every, keep_failed
        unread = [camera for camera in env.cameras if camera not in features.values()]
        self._cameras = {camera: stored_name(name) for name, camera in features.items()}
        self._cameras |= {camera: stored_name(camera) for camera in unread}
        self._state, self._action = map(stored_name, robot.whole_columns)
        self._instructions = {task: env.instruction(task) for task in tasks}
        seen = env.observe(env.reset(jax.random.split(jax.random.key(0), 1), np.array(tasks[:1])))
        single = {"shape": (1,), "names": None}
        try:
            self._parts = LeRobotParts(
                folder,
                fps=int(env.control_hz),
                features={
                    self._state: {"dtype": "float32", "shape": (env.state_dim,), "names": robot.state_names},
                    self._action: {"dtype": "float32", "shape": (env.action_dim,), "names": robot.action_names},
                    _REWARD: {"dtype": "float32", **single},
                    _SUCCESS: {"dtype": "bool", **single},
                    _DONE: {"dtype": "bool", **single},
                    **{
                        name: {"dtype": "image", "shape": seen.images[camera].shape[1:]}
                        for camera, name in self._cameras.items()
                    },
                },
                tasks=list(self._instructions.values()),
                robot_type=type(robot).__name__.lower(),
                identity=run,
            )
            if jax.process_index() == 0:
                self._parts.claim()
        except ValueError as error:
            raise UsageError(f"--rl.keep {folder}: {error}") from error
        # Episodes and steps so far; None before the first iteration.
        self._totals: tuple[int, int] | None = None
        # Of this iteration: its number if it is kept, the drafts of this process, and by wave the control steps and
        # outcomes of all episodes.
        self._part: int | None = None
        self._drafts: set[str] = set()
        self._waves: list[tuple[np.ndarray, np.ndarray]] = []

    def begin(self, iteration: int) -> None:
        """An iteration begins. Every process must call it."""
        self._part, self._drafts, self._waves = None, set(), []
        if self._totals is None:
            found = self._parts.begin(iteration) if jax.process_index() == 0 else None
            self._totals = tuple(agree.broadcast("kept episodes so far", found))
        if iteration % self._every == 0:
            self._part = iteration

    def recorder(self, numbers: np.ndarray) -> EpisodeRecorder | None:
        """What records a rollout of these rollouts, of which a repeated one counts where it is last; None: nothing."""
        if self._part is None:
            return None
        rows = {int(number): row for row, number in enumerate(numbers)}
        return EpisodeRecorder(self._env, list(rows.values()), list(self._cameras))

    def add(self, recorder: EpisodeRecorder | None, numbers: np.ndarray, tasks: np.ndarray) -> None:
        """Write what was recorded of these rollouts, whose tasks these are."""
        if recorder is None:
            return
        for number, row in {int(number): row for row, number in enumerate(numbers)}.items():
            episode = recorder.episode(row)
            success = np.array(episode["success"], bool)
            columns = {
                self._state: np.array(episode["state"], np.float32),
                self._action: np.array(episode["action"], np.float32),
                _REWARD: np.array(episode["reward"], np.float32),
                _SUCCESS: success,
                _DONE: np.arange(len(success)) == len(success) - 1,
            }
            pictures = {name: [step[camera] for step in episode["pictures"]] for camera, name in self._cameras.items()}
            name = _draft_name(len(self._waves), number)
            assert self._part is not None, "somebody records"
            self._parts.draft(self._part, name, columns, pictures, task=self._instructions[int(tasks[row])])
            self._drafts.add(name)

    def end_wave(self, steps: np.ndarray, outcomes: np.ndarray) -> None:
        """All processes' episodes of a wave took so many control steps, with these outcomes."""
        self._waves.append((steps.astype(int), outcomes))

    def end(self) -> None:
        """The iteration is over: its episodes become part of the dataset. Every process must call it."""
        if self._part is None:
            return
        assert self._totals is not None
        names, (episode, first_step) = [], self._totals
        for wave, (steps, outcomes) in enumerate(self._waves):
            for number in np.flatnonzero((outcomes > 0) | self._keep_failed).tolist():
                name, place = _draft_name(wave, number), len(names)
                if name in self._drafts:
                    self._parts.place(self._part, name, number=place, episode=episode + place, first_step=first_step)
                names.append(name)
                first_step += int(steps[number])
        self._totals = episode + len(names), first_step
        agree.barrier("kept episodes")
        if jax.process_index() == 0:
            self._parts.publish(self._part, names)
        self._part = None


def _draft_name(wave: int, number: int) -> str:
    return f"{wave:03d}-{number:06d}"
