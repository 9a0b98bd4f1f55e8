"""A run directory with a checkpoint of the initial state, for `serve` without training.

Read next: `serving.py`, which measures such a run's server.
"""

import dataclasses
import json
from pathlib import Path

import jax

from openpi_train.checkpoints.checkpoint_store import Checkpoints
from openpi_train.data.robot.normalize import norm_stats_json
from openpi_train.data.robot.opened import OpenedDatasets
from openpi_train.experiment import Experiment
from openpi_train.fields import as_json
from openpi_train.parallel.mesh import make_mesh
from openpi_train.parallel.state import TrainState
from openpi_train.parallel.strategy import Plan
from openpi_train.training import prepare
from openpi_train.training.init import create_state
from openpi_train.training.step import Trainer


@dataclasses.dataclass(frozen=True)
class Untrained:
    """A run directory, and the experiment that made it."""

    directory: Path
    experiment: Experiment
    data: OpenedDatasets
    trainer: Trainer
    state: TrainState


def save_untrained(experiment: Experiment, base: Path, moved: float = 0.0) -> Untrained:
    """Make the run below `base`; the average of its parameters differs from them by `moved`."""
    experiment = dataclasses.replace(experiment, exp_name="x", assets_base_dir=str(base / "assets"))
    directory = base / experiment.name / experiment.exp_name
    data = experiment.open_data()
    plan = Plan(mesh=make_mesh(1, jax.devices()[:1]), strategy="replicated")
    layout = prepare.whole_layout(experiment, plan)
    trainer = prepare.make_trainer(experiment, layout, plan)
    has_ema = experiment.ema_decay is not None
    state = create_state(layout, experiment.model, trainer.optimizer, experiment.is_frozen, has_ema, experiment.seed)
    if has_ema:
        state = dataclasses.replace(state, ema={path: leaf + moved for path, leaf in state.params.items()})
    norm_stats = {asset: norm_stats_json(stats) for asset, stats in data.norm_stats.items()}
    with Checkpoints(directory, public_name=experiment.model.param_rules.public_name) as checkpoints:
        checkpoints.save(
            state,
            data_position={},
            experiment=as_json(experiment),
            norm_stats=norm_stats,
            files=data.token_files,
            extra={"tokenizer": data.tokenizer, "text_length": data.text_length},
        )
    (directory / "experiment.json").write_text(json.dumps(as_json(experiment)))
    return Untrained(directory, experiment, data, trainer, state)
