"""Closed-loop evaluation during training: every process simulates its rows, all devices compute together.

Every device always computes on the same number of episodes, padded with empty rows, and an episode always has the same
position: so results do not depend on the number of processes or devices, bit for bit.
Read next: `envs/closed_loop.py`, `data/translation.py`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Key

from openpi_train.data.files import write_json
from openpi_train.data.interface import OpenedData
from openpi_train.data.opened import OpenedDatasets
from openpi_train.data.placement import from_devices, local_rows, on_devices
from openpi_train.data.transforms import Normalize
from openpi_train.data.translation import Translation
from openpi_train.envs.closed_loop import ClosedLoop, evaluate
from openpi_train.envs.env import Env, EnvObservation
from openpi_train.envs.score import Score
from openpi_train.envs.video import VideoRecorder
from openpi_train.evaluation.measure import Evaluated, Measure, Running, StoppedError, TrainerView
from openpi_train.evaluation.sums import CompiledPrograms
from openpi_train.fields import as_json
from openpi_train.models.model_config import as_policy
from openpi_train.nn.params import Params, merge_module
from openpi_train.runtime import agree
from openpi_train.runtime.exits import UsageError
from openpi_train.sharding.mesh import TENSOR
from openpi_train.types import observation as observation_of


class MeshPolicy:
    """A `rollout.Policy` that computes on all devices of a plan. All processes must call it equally often."""

    def __init__(self, trainer: TrainerView, translation: Translation, config: ClosedLoop, num_sample_steps: int):
        self._trainer, self._translation, self._env = trainer, translation, config.env
        self._num_steps = num_sample_steps
        self._cameras = {feature: _camera(feature, config.env) for feature in translation.robot.cameras.values()}
        mesh = trainer.plan.mesh
        self.batch_size = config.episodes_per_device * (mesh.size // mesh.shape[TENSOR])
        self.rows = local_rows(trainer.plan.batch, self.batch_size)
        self.params: Params = {}
        self._programs = CompiledPrograms({"policy": self._program})

    def __call__(self, observation: EnvObservation, keys: Key[Array, " b"]) -> np.ndarray:
        """The chunks [b, h, a] from the present control step on, in the robot's units."""
        images = {feature: np.asarray(observation.images[camera]) for feature, camera in self._cameras.items()}
        states, tasks = np.asarray(observation.state), np.asarray(observation.task)
        rows = [
            self._translation.row(
                {name: image[index] for name, image in images.items()},
                states[index],
                self._env.instruction(int(task)),
            )
            for index, task in enumerate(tasks)
        ]
        columns = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        batch = observation_of({name: self._placed(column) for name, column in columns.items()})
        data = self._placed(np.asarray(jax.random.key_data(keys)))
        chunks = from_devices(self._programs("policy", self.params, batch, data))
        present = states[:, -1] if states.ndim == 3 else states
        return np.stack([self._translation.actions(*pair) for pair in zip(chunks, present, strict=False)])

    def _placed(self, column: np.ndarray) -> jax.Array:
        filled = np.zeros((len(self.rows), *column.shape[1:]), column.dtype)
        filled[: len(column)] = column
        return on_devices(filled, self._trainer.plan.batch, self.batch_size, self.rows)

    def _program(self, params: Params, observation: Any, key_data: Any) -> Any:
        trainer = self._trainer
        chunk = as_policy(trainer.model).batch_spec(1, tuple(observation.images)).actions.shape[1:]

        def share(params, batch, rest):
            model: Any = merge_module(trainer.graphdef, params)
            observation, data = batch
            keys = jax.random.wrap_key_data(data)
            return trainer.objective.action_sampler.chunks(model, observation, keys, self._num_steps, chunk)

        return trainer.devices.rows(share, params, (observation, key_data), None)


class ClosedLoopSuccess(Measure):
    """Success rate of the averaged weights (or without an average, the weights) in the experiment's environment."""

    name = "closed loop"

    def __init__(self, running: Running, config: ClosedLoop, num_sample_steps: int):
        """Raises UsageError if the environment does not fit the robot."""
        self._running, self._config = running, config
        translation = translation_of(running.data, config)
        self._policy = MeshPolicy(running.trainer, translation, config, num_sample_steps)
        self._table = ""

    def is_due(self, step: int) -> bool:
        interval = self._config.interval
        return step in (0, self._running.num_train_steps) or bool(interval and step % interval == 0)

    def __call__(self, evaluated: Evaluated) -> dict[str, float]:
        """The success rates, also written with the videos to `eval/<step>` in the run directory."""
        policy, window = self._policy, as_policy(self._running.trainer.model).window
        policy.params = {**evaluated.frozen, **evaluated.averaged}
        folder = self._running.folder(evaluated.step)
        recorder = VideoRecorder(self._config.env, self._config.num_videos, folder / "videos")
        score = evaluate(
            lambda: policy,
            self._config,
            execute=window.num_executed,
            history=window.history,
            batch_size=policy.batch_size,
            rows=policy.rows,
            gather=agree.gather,
            all_done=lambda done: all(agree.gather("episodes that are over", done)),
            recorder=recorder,
            stop_requested=self._running.stop_requested,
        )
        if score is None:
            raise StoppedError
        write_score(folder, score, recorder, {"closed_loop": as_json(self._config)})
        self._table = score.table()
        return score.metrics()

    def line(self, values: Mapping[str, float]) -> str:
        del values
        return f"\n{self._table}"

    def change(self, first: Mapping[str, float], last: Mapping[str, float]) -> str | None:
        before, after = first.get("success/all"), last.get("success/all")
        if before is None or after is None:
            return None
        return f"success in the environment: {100 * before:.1f} % before, {100 * after:.1f} % after"


def write_score(folder: Path, score: Score, recorder: VideoRecorder, settings: Mapping[str, Any]) -> None:
    """Write `closed_loop.json`, which includes `settings`, and the videos. Every process must call it."""
    videos = sorted(path for part in agree.gather("videos", [path.name for path in recorder.write()]) for path in part)
    if jax.process_index() == 0:
        found = {"settings": settings, **score.as_json(), "videos": [f"videos/{name}" for name in videos]}
        write_json(folder / "closed_loop.json", found)


def translation_of(data: OpenedData, config: ClosedLoop) -> Translation:
    """The translation for the robot of `config.dataset`. Raises UsageError if robot and environment do not fit."""
    if not isinstance(data, OpenedDatasets):
        raise UsageError(f"--eval.closed-loop.env: {type(data).__name__} has no robot to act in it")
    env, windows = config.env, data.train.windows
    if not 0 <= config.dataset < len(windows):
        raise UsageError(
            f"--eval.closed-loop.dataset {config.dataset}: the run has {len(windows)} datasets, numbered from 0"
        )
    robot = windows[config.dataset].robot
    widths = {"actions": (len(robot.action_names), env.action_dim), "state": (len(robot.state_names), env.state_dim)}
    for name, (has, takes) in widths.items():
        if has != takes:
            raise UsageError(
                f"{type(robot).__name__} of dataset {config.dataset} has {has} {name} dims, {type(env).__name__} has "
                f"{takes}: choose another --eval.closed-loop.dataset or environment"
            )
    if missing := sorted(name for name in robot.cameras.values() if _camera(name, env) not in env.cameras):
        raise UsageError(
            f"{type(robot).__name__} of dataset {config.dataset} reads {', '.join(missing)}; {type(env).__name__} has "
            f"{', '.join(env.cameras) or 'no camera'}"
        )
    normalize, *transforms = data.train.transforms[config.dataset]
    assert isinstance(normalize, Normalize), "rows are normalised first (data/opened.py)"
    return Translation(
        robot=robot,
        normalize=normalize,
        transforms=tuple(transforms),
        spec=data.train.spec,
        window=windows[config.dataset].shape,
    )


def _camera(feature: str, env: Env) -> str:
    """The camera of `env` for a dataset's image feature; RLDS puts all observations below `observation/`."""
    return feature if feature in env.cameras else feature.removeprefix("observation/")
