"""Runs with a checkpoint and no training: what `load_policy` opens, and what the evaluation of training says of it."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import numpy as np

from openpi_train.data.normalize import norm_stats_json
from openpi_train.data.opened import OpenedData
from openpi_train.experiment import Experiment, as_json
from openpi_train.sharding.mesh import make_mesh
from openpi_train.sharding.strategy import Plan
from openpi_train.training import evaluate, prepare
from openpi_train.training.checkpoints.store import Checkpoints
from openpi_train.training.init import create_state
from openpi_train.training.start import open_run_data
from openpi_train.training.state import TrainState
from openpi_train.training.step import Trainer
from openpi_train.types import action_batch


@dataclasses.dataclass(frozen=True)
class SavedRun:
    """A run's directory with what made it; the average lies apart from the parameters."""

    directory: Path
    experiment: Experiment
    data: OpenedData
    trainer: Trainer
    state: TrainState

    def observation(self, row: int) -> dict:
        """What the robot saw at a held-out row, as a client would send it: the source's own columns and frames."""
        (windows,) = self.data.validation.windows
        _, _, (sample,) = self.data.validation.mixture.locate(np.array([row]))
        step = int(windows.starts[sample])
        behind = np.maximum(np.arange(step - windows.shape.history + 1, step + 1), windows.bounds(np.array([step]))[0])
        take = behind if windows.shape.history > 1 else behind[-1:]
        one = (lambda x: x) if windows.shape.history > 1 else (lambda x: x[0])
        images = {feature: one(windows.source.frames(take, feature)) for feature in windows.robot.cameras.values()}
        return {**images, "state": one(windows.steps.state[take]), "prompt": windows.prompt_at(step)}

    def held_out(self, count: int) -> dict:
        """Finished rows of the held-out feed."""
        return self.data.validation.batch(np.arange(count))[0]

    def action_error(self, count: int, average: bool = True) -> tuple[float, float]:
        """Sum and count of the squared errors of `val/action_mse` over so many held-out rows, by training's code."""
        batch = action_batch({**self.held_out(count), "row": np.arange(count, dtype=np.int32)})
        program = functools.partial(evaluate._action_error, self.trainer, self.experiment.eval.num_sample_steps)
        params = self.state.ema if average else self.state.params
        error, elements = jax.jit(program)(params, self.state.frozen, batch, np.int32(0))
        return float(error), float(elements)


def save_run(experiment: Experiment, base: Path, name: str = "x") -> SavedRun:
    """Make the run directory of an experiment at step 0, its average moved away from the parameters."""
    experiment = dataclasses.replace(experiment, exp_name=name, assets_base_dir=str(base / "assets"))
    directory = base / experiment.name / name
    data = open_run_data(experiment)
    experiment = dataclasses.replace(experiment, model=data.model)
    plan = Plan(mesh=make_mesh(1, jax.devices()[:1]), strategy="replicated")
    layout = prepare.whole_layout(experiment, plan)
    trainer = prepare.make_trainer(experiment, layout, plan)
    has_ema = experiment.ema_decay is not None
    state = create_state(layout, experiment.model, trainer.optimizer, experiment.is_frozen, has_ema, experiment.seed)
    if has_ema:
        moved = {path: leaf + 0.01 for path, leaf in state.params.items()}
        state = dataclasses.replace(state, ema=moved)
    norm_stats = {asset: norm_stats_json(stats) for asset, stats in data.norm_stats.items()}
    with Checkpoints(directory, public_name=experiment.model.public_name) as checkpoints:
        checkpoints.save(state, data_position={}, experiment=as_json(experiment), norm_stats=norm_stats)
    (directory / "experiment.json").write_text(json.dumps(as_json(experiment)))
    return SavedRun(directory, experiment, data, trainer, state)
