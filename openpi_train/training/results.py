"""`results.json`: a run's configuration, results and hardware. Read next: `run.py`, the caller."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from openpi_train.checkpoints.best import Best, lowest_loss
from openpi_train.data.core.files import read_json, write_json
from openpi_train.experiment import Experiment
from openpi_train.fields import as_json
from openpi_train.json_object import JsonObject
from openpi_train.parallel.mesh import FSDP, TENSOR
from openpi_train.parallel.strategy import Plan
from openpi_train.planning.gpu.run_account import RECORD, in_brief
from openpi_train.runtime import preempt
from openpi_train.runtime.exits import CheckpointError
from openpi_train.training.metrics import json_number


def write_results(
    path: Path,
    experiment: Experiment,
    plan: Plan,
    *,
    step: int,
    seconds: float,
    last_metrics: Mapping[str, float | None],
    evaluations: Sequence[JsonObject],
    checkpoints: Sequence[int],
    best: Best | None,
    proportions: Mapping[str, float],
    bad_records: int,
) -> None:
    """Write the file. For process 0 only; `seconds` are those of this start, the rest covers the whole run.

    The parts are those of the older trainers' results: `config`, `training_metrics`, `distributed_info`, `summary`.

    Raises CheckpointError if the disk has no space for it.
    """
    devices, lowest = jax.devices(), lowest_loss(evaluations)
    values = {
        "config": as_json(experiment),
        "training_metrics": {
            "last": {name: value for name, value in last_metrics.items() if value is None or math.isfinite(value)},
            "evaluations": [{name: json_number(value) for name, value in line.items()} for line in evaluations],
            "proportions": proportions,
            "bad_records": bad_records,
        },
        "distributed_info": {
            "processes": jax.process_count(),
            "devices": len(devices),
            "device_kind": devices[0].device_kind,
            "strategy": plan.strategy,
            "fsdp_devices": plan.mesh.shape[FSDP],
            "tensor_devices": plan.mesh.shape[TENSOR],
            "effective_batch_size": experiment.batch_size,
            "grad_accum": experiment.grad_accum,
        },
        **_gpu_step(path.parent / RECORD),
        "summary": {
            "experiment": experiment.name,
            "exp_name": experiment.exp_name,
            "directory": str(path.parent),
            "step": step,
            "num_train_steps": experiment.num_train_steps,
            "checkpoints": checkpoints,
            "best_step": best.step if best else None,
            "lowest_loss_step": lowest.step if lowest else None,
            "seconds": seconds,
            "stop_request": dataclasses.asdict(times) if (times := preempt.stop_times()) else None,
        },
    }
    try:
        write_json(path, values)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written ({error.strerror}). The checkpoint of step {step} is whole. Free some space on "
            "that disk, and start again with --resume: that writes it"
        ) from error


def _gpu_step(record: Path) -> dict[str, Any]:
    """`gpu_step`: the bound of the compiled step in brief, of a run on GPUs; empty elsewhere."""
    return {"gpu_step": in_brief(read_json(record))} if record.is_file() else {}
