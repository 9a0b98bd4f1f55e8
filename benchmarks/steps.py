"""A run's real training step on random data, for `step_time.py` and `checkpoint.py`."""

import argparse
import dataclasses
import functools
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from openpi_train.cli import parse_experiment
from openpi_train.experiment import Experiment
from openpi_train.parallel.state import TrainState
from openpi_train.runtime.world import WorldFlags, find_world
from openpi_train.training.init import initial_state
from openpi_train.training.settling import Prepared, Settling
from openpi_train.training.step import StepFunction
from openpi_train.types import OPENPI_SLOTS, action_batch, flatten_rows

TINY = "pi0_bridge_traj_tiny"
MODELS = {"tiny": TINY, "medium": f"{Path(__file__).with_name('medium.py')}:medium"}
# Compiles in less time.
QUICK = ("debug", "--model.remat", "dots", "--objective.no-augment")
QUICK += ("--model.language.depth", "1", "--model.action-expert.depth", "1")


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, Experiment]:
    """Parse the flags of a benchmark (`parser` holds its own) and the experiment to measure.

    With --quick, `QUICK` takes the place of the tiny model.

    Raises UsageError for an unknown experiment; exits with code 2 on an unknown flag.
    """
    parser.add_argument("--model", choices=tuple(MODELS), default="tiny", help=f"tiny: {TINY}'s; medium: 100 M")
    parser.add_argument("--experiment", metavar="NAME", help="a whole experiment instead; all its flags may follow")
    parser.add_argument("--quick", action="store_true", help="a few repetitions, to check that it runs")
    flags, rest = parser.parse_known_args(argv)
    if flags.quick:
        rest = ["--batch-size", str(2 * jax.device_count()), *rest]
        if not flags.experiment and flags.model == "tiny":
            flags.experiment, *own = QUICK
            rest = [*own, *rest]
    name = flags.experiment or MODELS[flags.model]
    return flags, parse_experiment(name, ["--exp-name", "benchmark", *rest])


@dataclasses.dataclass(frozen=True)
class Trial:
    """A prepared run without data. Use it inside `jax.set_mesh(trial.mesh)`."""

    experiment: Experiment
    prepared: Prepared

    @classmethod
    def of(cls, experiment: Experiment) -> "Trial":
        """Prepare the run. Raises UsageError if it does not fit the devices."""
        settling = Settling.here(experiment, find_world(WorldFlags(), {}))
        settling.require_room()
        return cls(settling.prepared.experiment, settling.prepared)

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The run's devices."""
        return self.prepared.trainer.plan.real_mesh

    @property
    def state_bytes(self) -> int:
        """Bytes of the whole state in a checkpoint."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.prepared.layout.shapes))

    @functools.cached_property
    def fresh_state(self) -> Callable[[], TrainState]:
        """Makes the state before the first step, always the same; compiled once."""
        experiment, optimizer, layout = self.experiment, self.prepared.trainer.optimizer, self.prepared.layout
        has_ema, is_frozen = experiment.ema_decay is not None, experiment.is_frozen
        make = functools.partial(
            initial_state, experiment.model, optimizer, is_frozen, has_ema, experiment.seed, layout.loss_scaling
        )
        return jax.jit(make, out_shardings=layout.shardings)

    def traced_step(self, slots: Sequence[str]) -> Any:
        """The training step for batches with these camera slots: a `jax.stages.Traced`."""
        layout = self.prepared.layout
        spec = self.experiment.model.rows.batch_spec(self.experiment.batch_size, slots)
        return self.prepared.trainer.traced_step(layout.shardings, layout.abstract(), spec)

    def batch(
        self, slots: Sequence[str], present: Sequence[str] = OPENPI_SLOTS, prompt_tokens: int | None = None
    ) -> Any:
        """Random rows on the devices. Slots that are not `present` hold masked black pictures.

        Prompts have `prompt_tokens` tokens (None: the model's maximum) before padding.
        """
        spec = self.experiment.model.rows.batch_spec(self.experiment.batch_size, slots)
        vocab_size = self.experiment.model.vocab_size
        rows = {name: _fill(name, leaf, present, vocab_size) for name, leaf in flatten_rows(spec).items()}
        if prompt_tokens is not None:
            rows["prompt_mask"] &= np.arange(rows["prompt_mask"].shape[1]) < prompt_tokens
        return jax.device_put(action_batch(rows), self.prepared.trainer.plan.batch)


def timed_steps(step: StepFunction, state: TrainState, batch: Any, count: int) -> tuple[float, TrainState]:
    """Seconds per step over `count` steps, where the host only waits for the last one; and the new state."""
    started = time.perf_counter()
    metrics: Any = None
    for _ in range(count):
        state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    return (time.perf_counter() - started) / count, state


def _fill(name: str, leaf: Any, present: Sequence[str], vocab_size: int) -> np.ndarray:
    """One column of the batch, independent of the other columns."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    kind, _, slot = name.partition("/")
    absent = bool(slot) and slot not in present
    if name == "row":
        return np.arange(leaf.shape[0], dtype=leaf.dtype)
    if kind == "image":
        return np.zeros(leaf.shape, np.uint8) if absent else random.integers(0, 256, leaf.shape, np.uint8)
    if leaf.dtype == bool:
        return np.full(leaf.shape, not absent)
    if name == "prompt_tokens":
        # Token by token over all rows: shorter prompts are the beginnings of longer ones.
        return np.ascontiguousarray(random.integers(0, vocab_size, leaf.shape[::-1], leaf.dtype).T)
    return random.normal(size=leaf.shape).astype(leaf.dtype)
