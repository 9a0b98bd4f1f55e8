"""Evaluates a run's state: the held-out loss, and the experiment's other measures. Read next: `run.py`."""

import logging
import time
from collections.abc import Mapping
from typing import Any

import jax

from openpi_train.evaluation.held_out_loss import HeldOutLoss
from openpi_train.evaluation.measure import Evaluated, EvaluationContext, Evaluations
from openpi_train.parallel.params import Params
from openpi_train.parallel.state import TrainState
from openpi_train.parallel.strategy import ON_HOST, Plan
from openpi_train.runtime.exits import UsageError
from openpi_train.runtime.preempt import StoppedError

logger = logging.getLogger(__name__)


class Evaluator:
    """Evaluates the states of a run. Every process must call it, at the same steps."""

    def __init__(self, running: EvaluationContext, evaluations: Evaluations):
        """Raises UsageError if something cannot be measured for this run."""
        self._plan: Plan = running.trainer.plan
        self._measures = [HeldOutLoss(running), *evaluations.measures(running)]
        self._copy: Any = None

    def __call__(self, state: TrainState) -> dict[str, float] | None:
        """The values by their names in `metrics.jsonl`; empty if nothing is due, None if a stop was requested
        meanwhile.

        Measures the trained weights, and their average (`_ema`) if the run keeps one. Raises UsageError if two measures
        have a value of the same name.
        """
        evaluated, values = self._weights(state), {}
        for measure in self._measures:
            if not measure.is_due(evaluated.step):
                continue
            started = time.perf_counter()
            try:
                found = measure(evaluated)
            except StoppedError:
                return None
            took = time.perf_counter() - started
            if twice := sorted(values.keys() & found.keys()):
                raise UsageError(f"two measures are called {', '.join(twice)}: rename one (--eval)")
            logger.info("%s, step %d (%.1f s): %s", measure.name, evaluated.step, took, measure.line(found))
            values |= found
        return values

    def changes(self, first: Mapping[str, float], last: Mapping[str, float]) -> list[str]:
        """The changes between these evaluations, for the log."""
        return [line for measure in self._measures if (line := measure.change(first, last)) is not None]

    def _weights(self, state: TrainState) -> Evaluated:
        average = {} if state.ema is None else {"_ema": self._on_devices(state.ema)}
        return Evaluated(step=int(state.step), weights={"": state.params, **average}, frozen=state.frozen)

    def _on_devices(self, params: Params) -> Params:
        """The same parameters on the devices, if they are kept in host memory between steps."""
        if "ema" not in ON_HOST[self._plan.offload]:
            return params
        if self._copy is None:
            self._copy = jax.jit(lambda params: params, out_shardings=self._plan.tree("state", params))
        return self._copy(params)
