"""The `convert` verb: a run's parameters as an openpi checkpoint directory. Read next: `interop/openpi.py`."""

import logging
import shutil
from pathlib import Path

from openpi_train.data.files import read_json
from openpi_train.experiment import Experiment, as_json
from openpi_train.interop import openpi
from openpi_train.runtime.exits import CheckpointError, UsageError
from openpi_train.training.checkpoints.step_dirs import StepDirs
from openpi_train.training.rundir import changed_fields

logger = logging.getLogger(__name__)


def export(experiment: Experiment, step: int | None, out: Path, merge_lora: bool) -> Path:
    """Write `<out>/params` and `<out>/assets` as openpi's reader expects them, from a run's checkpoint.

    Args: `step` None takes the newest; `merge_lora` folds low-rank adapters into the weights, so that a plain model
    loads them. Raises CheckpointError where there is no such checkpoint, UsageError where `out` exists.
    """
    run = Path(experiment.checkpoint_base_dir) / experiment.name / experiment.exp_name
    steps = StepDirs(run, keep_last=1, keep_period=None).complete() if run.is_dir() else []
    if not steps or (step is not None and step not in steps):
        raise CheckpointError(
            f"{run} has no {'checkpoint' if step is None else f'checkpoint {step}'}; there are: {steps or 'none'}. "
            "Choose with --exp-name, --checkpoint-base-dir and --step"
        )
    if out.exists():
        raise UsageError(f"--out {out} exists; give a directory that does not")
    source = run / str(steps[-1] if step is None else step)
    model = experiment.model
    changed = changed_fields(read_json(run / "experiment.json")["model"], as_json(model))
    if changed:
        listing = "\n".join(
            f"  model.{name}: the run has {was!r}, given {given!r}" for name, (was, given) in changed.items()
        )
        raise UsageError(f"{run} was trained with another model; repeat its --model flags:\n{listing}")
    params = openpi.load_params(source, model)
    if merge_lora:
        params = model.merge_lora(params)
    openpi.save_params(out, params, model.public_name)
    if (source / "assets").is_dir():
        shutil.copytree(source / "assets", out / "assets")
    logger.info("wrote %d parameters of %s to %s", len(params), source, out)
    return out
