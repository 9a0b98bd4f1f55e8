"""The experiment of a named run or checkpoint, as a trainer for torch begins with it. Read next: `vla/vla.py`."""

import dataclasses

from openpi_train.checkpoints.weights import CheckpointWeightLoader
from openpi_train.experiment import Experiment
from openpi_train.optim import AdamW, LRSchedule


def begun_anew(base: Experiment, *, name: str, rate: LRSchedule, output: str) -> Experiment:
    """`base` with its model, data and robot, and nothing of how it was trained: torch's AdamW at this rate, no average,
    no accumulation, no scaling of the rate, no start weights; as the experiment `name`, in the folder `output`."""
    return dataclasses.replace(
        base,
        name=name,
        exp_name="",
        weight_loader=CheckpointWeightLoader(),
        lr_schedule=rate,
        optimizer=AdamW(b2=0.999, weight_decay=0.01),
        ema_decay=None,
        grad_accum=1,
        micro_batch_size=None,
        lr_scaling="none",
        reference_batch_size=None,
        resume=False,
        overwrite=False,
        checkpoint_base_dir=output,
    )
