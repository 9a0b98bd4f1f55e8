"""The `convert` verb: a run's parameters as an openpi checkpoint directory. Read next: `interop/openpi.py`."""

import dataclasses
import logging
from pathlib import Path

from openpi_train.data.files import read_json
from openpi_train.experiment import Experiment, as_json
from openpi_train.interop import openpi
from openpi_train.interop.formats import model_params, open_checkpoint
from openpi_train.interop.stored import in_memory
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
    stored = open_checkpoint(source, model)
    params = model_params(stored, model)
    if merge_lora:
        whole = model.merge_lora({path: leaf.whole() for path, leaf in params.items()})
        params = {path: in_memory(value) for path, value in whole.items()}
    published = {model.public_name(path): leaf for path, leaf in params.items()}
    openpi.write(out, dataclasses.replace(stored, params=published))
    logger.info("wrote %d parameters of %s to %s", len(params), source, out)
    return out
