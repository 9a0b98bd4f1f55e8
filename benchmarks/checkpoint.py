"""How long a save blocks training: synchronous saves against saves in the background.

A save costs more than its call, in which the state is copied to the host: the threads that write it take CPU time
from the following steps. The stall is therefore the call plus the extra time of every following step until the
checkpoint is complete, relative to the median step just before.
"""

import argparse
import dataclasses
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import jax

from benchmarks import steps
from benchmarks.report import Cell, Spread, Table
from benchmarks.steps import Trial, timed_steps
from openpi_train.checkpoints.checkpoint_store import Checkpoints
from openpi_train.experiment import Experiment
from openpi_train.parallel.state import TrainState
from openpi_train.types import OPENPI_SLOTS

NUM_PAIRS, NUM_TYPICAL = 5, 9
# Steps between saves to which the stall is compared, and the maximum number of steps to wait for the end of a save.
INTERVAL = 100
# The second state: the tiny model with a large vocabulary, whose step is still short.
LARGE_BYTES = 300e6
MODES = ("synchronous", "asynchronous")
COLUMNS = (
    "state",
    "MB",
    "save",
    "step ms",
    "save call ms",
    "next step extra ms",
    "all following extra ms",
    "stall ms",
    "asynchronous / synchronous",
    f"stall / {INTERVAL} steps",
)


@dataclasses.dataclass(frozen=True)
class Save:
    """What one save cost, in seconds: `following_s` are the steps until it was complete."""

    typical_step_s: float
    call_s: float
    following_s: tuple[float, ...]

    @property
    def extra_s(self) -> float:
        """Extra time of the following steps compared with the same number of typical steps."""
        return sum(self.following_s) - len(self.following_s) * self.typical_step_s

    @property
    def stall_s(self) -> float:
        """Total time that training lost."""
        return self.call_s + self.extra_s


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Experiment]:
    """Parse the command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m benchmarks checkpoint", description=__doc__)
    parser.add_argument("--directory", type=Path, help="an existing folder on the disk to write to (default: /tmp)")
    return steps.parse(parser, argv)


def main(argv: Sequence[str]) -> list[Table]:
    """Run the benchmark and return its tables."""
    flags, experiment = parse(argv)
    trials = {flags.experiment or flags.model: Trial.of(experiment)}
    if not flags.experiment and flags.model == "tiny":
        trials["large"] = _larger(trials["tiny"], LARGE_BYTES)
    rows = [row for name, trial in trials.items() for row in _rows(name, trial, flags)]
    notes = [
        "stall = save call + extra time of the steps until the checkpoint is complete; negative extras are noise.",
    ]
    return [Table(f"Checkpoint stall, written to {flags.directory or tempfile.gettempdir()}", COLUMNS, rows, notes)]


def _larger(trial: Trial, state_bytes: float) -> Trial:
    """The trial with a vocabulary that gives a state of about this size."""
    size = trial.experiment.model.vocab_size
    tables = [leaf for leaf in jax.tree.leaves(trial.prepared.layout.shapes) if size in leaf.shape]
    token_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in tables) / size
    vocab_size = size + round((state_bytes - trial.state_bytes) / token_bytes)
    model = dataclasses.replace(trial.experiment.model, vocab_size=vocab_size)
    return Trial.of(dataclasses.replace(trial.experiment, model=model))


def _rows(name: str, trial: Trial, flags: argparse.Namespace) -> list[list[Cell]]:
    """One row per mode; the two modes alternate."""
    # The first save sets up Orbax's threads and folders, and is not counted.
    slots, rounds, num_typical = trial.experiment.data.cameras, (False, *(True,) * NUM_PAIRS), NUM_TYPICAL
    if flags.quick:  # the program of `step_time --quick`, which need not be compiled again
        slots, rounds, num_typical = OPENPI_SLOTS[:1], (True,), 3
    saves: dict[str, list[Save]] = {mode: [] for mode in MODES}
    with jax.set_mesh(trial.mesh), tempfile.TemporaryDirectory(dir=flags.directory, prefix="benchmark-save-") as folder:
        step = trial.traced_step(slots).lower().compile()
        state, batch = trial.fresh_state(), trial.batch(slots)
        _, state = timed_steps(step, state, batch, 2)
        with Checkpoints(folder, public_name=trial.experiment.model.param_rules.public_name) as checkpoints:
            for counted in rounds:
                for mode in MODES:
                    save, state = _save(checkpoints, step, state, batch, num_typical, mode == "synchronous")
                    saves[mode] += [save] if counted else []
    stalls = {mode: _spread(saves[mode], lambda save: 1e3 * save.stall_s) for mode in MODES}
    return [
        [
            name,
            trial.state_bytes / 1e6,
            mode,
            _spread(saves[mode], lambda save: 1e3 * save.typical_step_s),
            _spread(saves[mode], lambda save: 1e3 * save.call_s),
            _spread(saves[mode], lambda save: 1e3 * (save.following_s[0] - save.typical_step_s)),
            _spread(saves[mode], lambda save: 1e3 * save.extra_s),
            stalls[mode],
            stalls[mode].over(stalls["synchronous"]) if mode == "asynchronous" else None,
            f"{_spread(saves[mode], lambda save: 100 * save.stall_s / (INTERVAL * save.typical_step_s))} %",
        ]
        for mode in MODES
    ]


def _spread(saves: Sequence[Save], quantity: Any) -> Spread:
    return Spread(tuple(map(quantity, saves)))


def _save(
    checkpoints: Checkpoints, step: Any, state: TrainState, batch: Any, num_typical: int, wait: bool
) -> tuple[Save, TrainState]:
    """Measure one save during training; also returns the state after the following steps."""
    typical = []
    for _ in range(num_typical):
        seconds, state = timed_steps(step, state, batch, 1)
        typical.append(seconds)
    saved = int(state.step)
    started = perf_counter()
    checkpoints.save(state, data_position={}, experiment={}, norm_stats={})
    if wait:
        checkpoints.wait()
    call_s = perf_counter() - started
    following: list[float] = []
    while not following or (saved not in checkpoints.steps() and len(following) < INTERVAL):
        seconds, state = timed_steps(step, state, batch, 1)
        following.append(seconds)
    checkpoints.wait()
    return Save(statistics.median(typical), call_s, tuple(following)), state
