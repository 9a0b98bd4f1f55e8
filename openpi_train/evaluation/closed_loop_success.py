"""Closed-loop evaluation during training: every process simulates its rows, all devices compute together.

Results do not depend on the number of processes or devices, bit for bit (`row_sampling.py`).
Read next: `envs/closed_loop.py`, `robot_rows.py`.
"""

from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Array, Float, Key

from openpi_train.data.core.files import write_json
from openpi_train.data.robot.translation import Translation
from openpi_train.data.robot.windows import WindowShape
from openpi_train.envs.closed_loop import ClosedLoop, evaluate, protocol
from openpi_train.envs.env import EnvObservation
from openpi_train.envs.score import Score
from openpi_train.envs.video import VideoRecorder
from openpi_train.evaluation.measure import Evaluated, EvaluationContext, Measure, TrainerView
from openpi_train.evaluation.robot_rows import RobotRows, translation_of
from openpi_train.evaluation.row_sampling import RowSampling
from openpi_train.fields import as_json
from openpi_train.json_object import JsonObject
from openpi_train.models.model_config import as_policy
from openpi_train.parallel.params import Params
from openpi_train.runtime import agree
from openpi_train.runtime.preempt import StoppedError
from openpi_train.types import Network, Observation


class MeshPolicy:
    """A `rollout.Policy` that computes on all devices of a plan. All processes must call it equally often."""

    def __init__(self, trainer: TrainerView, translation: Translation, config: ClosedLoop, num_sample_steps: int):
        self._trainer, self._num_steps = trainer, num_sample_steps
        self._robot_rows = RobotRows(translation, config.env)
        self._sampling = RowSampling(trainer, self._draw, rows_per_device=config.episodes_per_device)
        self.batch_size, self.rows = self._sampling.batch_size, self._sampling.rows
        self.params: Params = {}

    def __call__(self, observation: EnvObservation, keys: Key[Array, " b"]) -> np.ndarray:
        """The chunks [b, h, a] from the present control step on, in the robot's units."""
        chunks = self._sampling(self.params, self._robot_rows.columns(observation), keys)
        return self._robot_rows.actions(chunks, observation)

    def _draw(self, model: Network, observation: Observation, keys: Key[Array, " b"]) -> Float[Array, "b h a"]:
        chunk = as_policy(self._trainer.model).rows.batch_spec(1, tuple(observation.images)).actions.shape[1:]
        return self._trainer.objective.action_sampler.chunks(model, observation, keys, self._num_steps, chunk)


class ClosedLoopSuccess(Measure):
    """Success rate of the averaged weights (or without an average, the weights) in the experiment's environment."""

    name = "closed loop"

    def __init__(self, running: EvaluationContext, config: ClosedLoop, num_sample_steps: int):
        """Raises UsageError if the environment does not fit the robot."""
        self._running, self._config = running, config
        translation = translation_of(running.data, config.env, config.dataset, flag="--eval.closed-loop")
        self._policy = MeshPolicy(running.trainer, translation, config, num_sample_steps)
        self._table = ""

    def is_due(self, step: int) -> bool:
        interval = self._config.interval
        return step in (0, self._running.num_train_steps) or bool(interval and step % interval == 0)

    def __call__(self, evaluated: Evaluated) -> dict[str, float]:
        """The success rates, also written with the videos to `eval/<step>` in the run directory."""
        policy, window = self._policy, as_policy(self._running.trainer.model).rows.window
        policy.params = {**evaluated.frozen, **evaluated.averaged}
        folder = self._running.folder(evaluated.step)
        recorder = VideoRecorder(self._config.env, self._config.num_videos, folder / "videos")
        score = evaluate(
            lambda: policy,
            self._config,
            execute=num_executed(self._config, window),
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
        self._table = f"{protocol(self._config, num_executed(self._config, window))}\n{score.table()}"
        return score.metrics()

    def line(self, values: Mapping[str, float]) -> str:
        del values
        return f"\n{self._table}"

    def change(self, first: Mapping[str, float], last: Mapping[str, float]) -> str | None:
        before, after = first.get("success/all"), last.get("success/all")
        if before is None or after is None:
            return None
        return f"success in the environment: {100 * before:.1f} % before, {100 * after:.1f} % after"


def num_executed(config: ClosedLoop, window: WindowShape) -> int:
    """The actions of a chunk that are executed before the next query of a policy with this window.

    `config.execute` if it is given; else the model's own number, the environment's published one, or half of the chunk.
    """
    if config.execute is not None:
        return config.execute
    if window.execute is None and config.env.replan_steps is not None:
        return min(config.env.replan_steps, window.num_ahead)
    return window.num_executed


def write_score(folder: Path, score: Score, recorder: VideoRecorder, settings: JsonObject) -> None:
    """Write `closed_loop.json`, which includes `settings`, and the videos. Every process must call it."""
    videos = sorted(path for part in agree.gather("videos", [path.name for path in recorder.write()]) for path in part)
    if jax.process_index() == 0:
        found = {"settings": settings, **score.as_json(), "videos": [f"videos/{name}" for name in videos]}
        write_json(folder / "closed_loop.json", found)
