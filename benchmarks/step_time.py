"""Step time with 3, 2 and 1 present cameras: our step against a reference, which is our own step doing openpi's work.

The reference is not openpi's program; `reference.py` describes it. First it recomputes what ours does (the
same `--model.remat`): like for like. Then, if ours is not `full`, it recomputes every layer, as openpi does. Both
alternate (A B A B ...) on one donated state, so other load on the machine slows both. First their losses from equal
states are compared. Read next: `reference.py`, `steps.py`.
"""

import argparse
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import steps
from benchmarks.reference import reference
from benchmarks.report import Cell, Spread, Table
from benchmarks.steps import Trial, timed_steps
from openpi_train.experiment import Experiment
from openpi_train.parallel.state import TrainState
from openpi_train.planning.flops import product_flops
from openpi_train.runtime.device_limits import peak_flops
from openpi_train.types import OPENPI_SLOTS

# A sample has as many steps as take this long, so that dispatch on the host is hidden as in training.
SAMPLE_S = 0.25
# Steps from the initial state whose losses are compared; they also warm up both programs.
NUM_COMPARED = 3

# What openpi's backward pass recomputes.
OPENPI_REMAT = "full"

COLUMNS = (
    "cameras",
    "step ms",
    "samples/s",
    "TFLOP/s",
    "MFU",
    "program MiB",
    "reference step ms",
    "reference samples/s",
    "reference program MiB",
    "loss difference",
    "FLOPs reference / ours",
    "time reference / ours",
)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Experiment]:
    """Parse the command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m benchmarks step_time", description=__doc__)
    parser.add_argument("--cameras", type=int, nargs="+", choices=(1, 2, 3), help="rows to measure (default: 3 2 1)")
    parser.add_argument("--pairs", type=int, default=15, metavar="N", help="samples of each step (default: 15)")
    text = "the longest prompt: ours has no more, the reference pads to the model's limit (default: the limit)"
    parser.add_argument("--prompt-tokens", type=int, metavar="N", help=text)
    flags, experiment = steps.parse(parser, argv)
    flags.cameras = flags.cameras or ((3, 1) if flags.quick else (3, 2, 1))
    return flags, experiment


def main(argv: Sequence[str]) -> list[Table]:
    """Run the benchmark and return its tables."""
    flags, experiment = parse(argv)
    whole = Trial.of(experiment)
    if flags.prompt_tokens is not None:
        model: Any = dataclasses.replace(experiment.model, max_token_len=flags.prompt_tokens)  # pyright: ignore[reportCallIssue]
        experiment = dataclasses.replace(experiment, model=model)
    ours = Trial.of(experiment)
    with jax.set_mesh(ours.mesh):
        programs = [Program(ours, OPENPI_SLOTS[:count]) for count in flags.cameras]
        return [_table(programs, reference(whole, remat), flags) for remat in remats(ours.experiment)]


def remats(experiment: Experiment) -> list[str]:
    """The rematerialisation policies of the reference, one table each: the same as ours, then openpi's if different."""
    model: Any = experiment.model
    return list(dict.fromkeys((model.remat, OPENPI_REMAT)))


class Program:
    """A compiled step for some camera slots."""

    def __init__(self, trial: Trial, slots: Sequence[str]):
        self.trial, self.slots = trial, slots
        traced = trial.traced_step(slots)
        self.step = traced.lower().compile()
        # Of all products, with and without those that are computed again.
        self.executed_flops, self.model_flops = (
            product_flops(traced.jaxpr.jaxpr, recomputed=it) for it in (True, False)
        )

    @property
    def size_mib(self) -> float:
        """Device memory of one step as reported by the compiler: state, batch, results and scratch space."""
        sizes = self.step.memory_analysis()
        own = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
        return (own + sizes.temp_size_in_bytes + sizes.generated_code_size_in_bytes) / 2**20

    def first_losses(self, state: TrainState, batch: Any) -> tuple[np.ndarray, TrainState]:
        """Losses of the first steps from this state, float32 [NUM_COMPARED]; and the state after them."""
        losses = []
        for _ in range(NUM_COMPARED):
            state, metrics = self.step(state, batch)
            losses.append(metrics["loss"])
        return np.asarray(jax.device_get(losses)), state


def _table(programs: Sequence[Program], theirs: Trial, flags: argparse.Namespace) -> Table:
    experiment, shapes = programs[0].trial.experiment, programs[0].trial.prepared.layout.shapes
    num_params = sum(leaf.size for leaf in jax.tree.leaves((shapes.params, shapes.frozen)))
    name = flags.experiment or flags.model
    ours, other = (each.model.remat for each in (experiment, theirs.experiment))
    same = f"like for like, both remat {ours}" if ours == other else f"ours remat {ours}, reference {other} as openpi"
    title = f"Step time, {same}: {name}, {num_params / 1e6:,.1f} M parameters, batch {experiment.batch_size}"
    program = Program(theirs, OPENPI_SLOTS)
    return Table(title, COLUMNS, [_row(each, program, flags) for each in programs], _notes(experiment))


def _row(ours: Program, theirs: Program, flags: argparse.Namespace) -> list[Cell]:
    batches = [each.trial.batch(each.slots, ours.slots, flags.prompt_tokens) for each in (ours, theirs)]
    fresh_state = ours.trial.fresh_state
    losses = ours.first_losses(fresh_state(), batches[0])[0]  # its state is dropped: a second one might not fit
    their_losses, state = theirs.first_losses(fresh_state(), batches[1])
    step_s, state = timed_steps(ours.step, state, batches[0], 1)
    num_steps = 1 if flags.quick else math.ceil(SAMPLE_S / step_s)
    times: tuple[list[float], list[float]] = [], []
    for _ in range(2 if flags.quick else flags.pairs):
        for program, batch, samples in zip((ours, theirs), batches, times, strict=True):
            seconds, state = timed_steps(program.step, state, batch, num_steps)
            samples.append(seconds)
    own, other = (Spread(tuple(samples)) for samples in times)
    experiment = ours.trial.experiment
    flops = ours.model_flops  # as `mfu` counts them
    peak = peak_flops(jax.devices()[0].device_kind, experiment.model.compute.dtype)
    return [
        len(ours.slots),
        own.map(lambda seconds: 1e3 * seconds),
        experiment.batch_size / own.median,
        flops / own.median / 1e12,
        f"{100 * flops / own.median / (peak * jax.device_count()):.1f} %" if peak else None,
        ours.size_mib,
        other.map(lambda seconds: 1e3 * seconds),
        experiment.batch_size / other.median,
        theirs.size_mib,
        f"{np.max(np.abs(losses - their_losses)):.1e} of {losses[0]:.3f}",
        theirs.executed_flops / ours.executed_flops,
        other.over(own),
    ]


def _notes(experiment: Experiment) -> list[str]:
    model: Any = experiment.model
    notes = [
        f"Ours: {model.dtype}, --model.remat {model.remat}, --model.attention {model.attention}, prompts of "
        f"{model.rows.text_limit} tokens. The reference is our own step with openpi's work to do, not openpi: all "
        "three cameras, XLA's attention, the whole last layer, updates unseen. MFU counts the model's own FLOPs, the "
        "ratio of FLOPs those that are executed. `program MiB`, per device, is the compiler's account."
    ]
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        notes.append(f"Peak device memory of the whole process: {stats['peak_bytes_in_use'] / 2**30:.1f} GiB.")
    return notes
