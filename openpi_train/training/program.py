"""The compiled training step, and the FLOPs and traffic read from it: a run's `program.json`.

Read next: `planning/flops.py` and `planning/traffic.py`, which count; `recorder.py`, which makes rates of it.
"""

import dataclasses
import functools
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from jax.extend.core import Jaxpr

from openpi_train.parallel.state import TrainState
from openpi_train.planning.flops import product_flops
from openpi_train.planning.traffic import collectives
from openpi_train.runtime import phases
from openpi_train.training.lateness import Lateness
from openpi_train.training.step import Metrics, Trainer
from openpi_train.training.traced_steps import instruction_roles
from openpi_train.types import Batch

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """One optimizer step of the whole batch.

    `model_flops` are forward and backward, `executed_flops` also recomputation; only products, over all
    devices. `sent_bytes` are those that one device sends, by kind of collective; None if the compiler does not
    know how often one runs. `compile_s` includes tracing.
    """

    model_flops: float
    executed_flops: float
    sent_bytes: Mapping[str, float] | None
    compile_s: float

    @classmethod
    def of(cls, jaxpr: Jaxpr, hlo: str, compile_s: float) -> "Program":
        """The figures of a traced and compiled step."""
        return cls(
            model_flops=product_flops(jaxpr, recomputed=False),
            executed_flops=product_flops(jaxpr),
            sent_bytes=_sent_bytes(hlo),
            compile_s=compile_s,
        )

    def line(self) -> str:
        """For the log."""
        again = self.executed_flops / max(self.model_flops, 1.0)
        words = f"a step computes {self.model_flops / 1e9:,.1f} GFLOP, {again:.2f} times that with what is recomputed"
        if not self.sent_bytes:
            return words
        kinds = ", ".join(f"{kind} {size / 1e6:,.1f}" for kind, size in self.sent_bytes.items())
        return f"{words}; each device sends {sum(self.sent_bytes.values()) / 1e6:,.1f} MB ({kinds})"


class Programs:
    """The training step for batches of several shapes (see `data/core/text_lengths.py`), compiled ahead.

    `longest` has the figures of the program that computes most, `compiled` is that program; `last` has those of the
    program called last. `lateness` is told of each step.
    """

    def __init__(self, trainer: Trainer, state_shardings: TrainState, state: TrainState):
        """`state` may be shapes."""
        self.lateness: Lateness | None = None
        self._step_for = functools.partial(trainer.traced_step, state_shardings, state)
        self._steps: dict[Any, tuple[jax.stages.Compiled, Program]] = {}

    def compile(self, batches: Iterable[Batch]) -> None:
        """Compile the step for those of `batches`, trees of shapes, for which there is none yet. They must be the same
        on all processes."""
        for batch in batches:
            if _shapes(batch) in self._steps:
                continue
            started = time.perf_counter()
            traced = self._step_for(batch)
            compiled = traced.lower().compile()
            hlo = (compiled.as_text() or "") if jax.device_count() > 1 else ""  # one device sends nothing
            program = Program.of(traced.jaxpr, hlo, time.perf_counter() - started)
            logger.info("compiled the training step in %.1f s: %s", program.compile_s, program.line())
            self._steps[_shapes(batch)] = compiled, program
            phases.progress()
        self.compiled, self.longest = max(self._steps.values(), key=lambda one: one[1].model_flops)
        self.last = self.longest

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One step, by the program for this batch's shapes."""
        step, self.last = self._steps[_shapes(batch)]
        if self.lateness is None:
            return step(state, batch)
        self.lateness.dispatching()
        state, metrics = step(state, batch)
        self.lateness.dispatched(metrics["loss"])
        return state, metrics

    def instruction_roles(self) -> dict[str, str | None]:
        """Which instructions of these programs communicate, and which only run others (`traced_steps.py`)."""
        texts = filter(None, (step.as_text() for step, _ in self._steps.values()))
        return {name: role for text in texts for name, role in instruction_roles(text).items()}


def _shapes(batch: Batch) -> tuple[tuple[int, ...], ...]:
    return tuple(leaf.shape for leaf in jax.tree.leaves(batch))


def _sent_bytes(hlo: str) -> dict[str, float] | None:
    sent: dict[str, float] = {}
    try:
        for one in collectives(hlo, jax.device_count()) if hlo else ():
            sent[one.kind] = sent.get(one.kind, 0.0) + one.sent_bytes
    except ValueError as error:
        logger.warning("how much a step sends is unknown: %s", error)
        return None
    return sent
