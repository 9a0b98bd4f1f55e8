"""Runs with a checkpoint and no training: what `load_policy` opens, and what the evaluation of training says of it."""

import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np

from benchmarks.untrained import Untrained, save_untrained
from openpi_train.evaluation.action_error import action_error
from openpi_train.experiment import Experiment
from openpi_train.types import action_batch


@dataclasses.dataclass(frozen=True)
class SavedRun(Untrained):
    """A run's directory, and what is known of its held-out rows."""

    def observation(self, row: int) -> dict:
        """What the robot saw at a held-out row, as a client would send it: the source's own columns and frames."""
        (dataset,), _, (sample,) = self.data.validation.mixture.locate(np.array([row]))
        windows = self.data.validation.windows[dataset]
        step = int(windows.starts[sample])
        behind = np.maximum(np.arange(step - windows.shape.history + 1, step + 1), windows.bounds(np.array([step]))[0])
        images = {feature: windows.source.frames(behind, feature) for feature in windows.robot.cameras.values()}
        steps = {**images, "state": windows.steps.state[behind]}
        seen = steps if windows.shape.history > 1 else {key: value[0] for key, value in steps.items()}
        return {**seen, "prompt": windows.prompt_at(step)}

    def held_out(self, count: int) -> dict:
        """Finished rows of the held-out feed."""
        return self.data.validation.batch(np.arange(count))[0]

    def action_error(self, count: int, average: bool = True) -> tuple[float, float]:
        """Sum and count of the squared errors of `val/action_mse` over so many held-out rows, by training's code."""
        batch = action_batch({**self.held_out(count), "row": np.arange(count, dtype=np.int32)})
        program = functools.partial(action_error, self.trainer, self.experiment.robot_eval.num_sample_steps)
        params = self.state.ema if average else self.state.params
        error, elements = jax.jit(program)(params, self.state.frozen, batch, np.int32(0))
        return float(error), float(elements)


def save_run(experiment: Experiment, base: Path) -> SavedRun:
    """Make the run directory of an experiment at step 0, its average moved away from the parameters."""
    made = save_untrained(experiment, base, moved=0.01)
    return SavedRun(**{field.name: getattr(made, field.name) for field in dataclasses.fields(made)})
