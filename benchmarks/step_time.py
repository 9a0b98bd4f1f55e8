"""Step time with 3, 2 and 1 present cameras: absent slots left out, against absent slots padded with black pictures.

Both forms run in turn (A B A B ...) on one donated state, so that whatever else slows the machine slows both. That they
compute the same loss is measured first, from equal states. Read next: `steps.py`.
"""

import argparse
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import steps
from benchmarks.report import Cell, Spread, Table
from benchmarks.steps import SLOTS, Trial, timed_steps
from openpi_train.experiment import Experiment
from openpi_train.planning.devices import peak_flops
from openpi_train.training.state import TrainState

NUM_PAIRS = 15
# A sample is as many steps as take this long, so that the host's dispatch is hidden as it is in training.
SAMPLE_S = 0.25
# Steps from the fresh state whose losses are compared; they also warm both programs up.
NUM_COMPARED = 3

COLUMNS = (
    "cameras",
    "step ms",
    "samples/s",
    "TFLOP/s",
    "MFU",
    "program MiB",
    "padded step ms",
    "loss difference",
    "FLOPs padded / present",
    "time padded / present",
)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Experiment]:
    """The command line, understood."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks step_time", description=__doc__)
    parser.add_argument("--cameras", type=int, nargs="+", choices=(1, 2, 3), default=(3, 2, 1), help="rows to measure")
    return steps.parse(parser, argv)


def main(argv: Sequence[str]) -> list[Table]:
    """Measure as the flags say."""
    flags, experiment = parse(argv)
    trial = Trial.of(experiment)
    with jax.set_mesh(trial.mesh):
        padded_step = trial.compile_step(SLOTS)
        rows = [_row(trial, padded_step, count, flags.quick) for count in flags.cameras]
    shapes = trial.prepared.layout.shapes
    num_params = sum(leaf.size for leaf in jax.tree.leaves((shapes.params, shapes.frozen)))
    name = flags.experiment or flags.model
    title = f"Step time: {name}, {num_params / 1e6:,.1f} M parameters, batch {experiment.batch_size}"
    return [Table(title, COLUMNS, rows, _notes())]


def _row(trial: Trial, padded_step: Any, num_cameras: int, quick: bool) -> list[Cell]:
    present = SLOTS[:num_cameras]
    # With every camera there the two forms are one program: that row shows what the method itself scatters.
    step = padded_step if num_cameras == len(SLOTS) else trial.compile_step(present)
    batch, padded_batch = trial.batch(present), trial.batch(SLOTS, present)
    losses, _ = _first_losses(trial, step, batch)
    padded_losses, state = _first_losses(trial, padded_step, padded_batch)
    step_s, state = timed_steps(step, state, batch, 1)
    num_steps = 1 if quick else math.ceil(SAMPLE_S / step_s)
    times, padded_times = [], []
    for _ in range(2 if quick else NUM_PAIRS):
        for program, rows, samples in ((step, batch, times), (padded_step, padded_batch, padded_times)):
            seconds, state = timed_steps(program, state, rows, num_steps)
            samples.append(seconds)
    own, padded = Spread(tuple(times)), Spread(tuple(padded_times))
    experiment = trial.experiment
    flops, padded_flops = (_step_flops(experiment, count) for count in (num_cameras, len(SLOTS)))
    peak = peak_flops(jax.devices()[0].device_kind)
    return [
        num_cameras,
        own.map(lambda seconds: 1e3 * seconds),
        experiment.batch_size / own.median,
        flops / own.median / 1e12,
        f"{100 * flops / own.median / (peak * jax.device_count()):.1f} %" if peak else None,
        _program_bytes(step) / 2**20,
        padded.map(lambda seconds: 1e3 * seconds),
        f"{np.max(np.abs(losses - padded_losses)):.1e} of {losses[0]:.3f}",
        padded_flops / flops,
        padded.over(own),
    ]


def _first_losses(trial: Trial, step: Any, batch: Any) -> tuple[np.ndarray, TrainState]:
    """Losses of the first steps from the fresh state, float32 [NUM_COMPARED]."""
    state, losses = trial.fresh_state(), []
    for _ in range(NUM_COMPARED):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return np.asarray(jax.device_get(losses)), state


def _step_flops(experiment: Experiment, num_cameras: int) -> float:
    """The model's own work in a step, forward and twice that backward, without recomputation, as `mfu` counts it."""
    draws = experiment.objective.draws_per_row
    return 3 * experiment.model.flops_per_row(num_cameras, draws) * experiment.batch_size


def _program_bytes(step: Any) -> int:
    """Device memory of one step by the compiler's account: state, batch, results and scratch space."""
    sizes = step.memory_analysis()
    donated = sizes.alias_size_in_bytes
    return (
        sizes.argument_size_in_bytes
        + sizes.output_size_in_bytes
        - donated
        + sizes.temp_size_in_bytes
        + sizes.generated_code_size_in_bytes
    )


def _notes() -> list[str]:
    notes = [
        "MFU counts the model's own FLOPs (no recomputation); `program MiB`, per device, is the compiler's account. "
        "With 3 cameras both forms are the same program: that row is the control."
    ]
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        notes.append(f"Peak device memory of the whole process: {stats['peak_bytes_in_use'] / 2**30:.1f} GiB.")
    return notes
