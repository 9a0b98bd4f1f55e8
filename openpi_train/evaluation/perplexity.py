"""Perplexity of held-out texts. Read next: `sums.py`."""

from typing import Any

import numpy as np

from openpi_train.evaluation.measure import Evaluated, Measure, Running
from openpi_train.evaluation.sums import Ratio
from openpi_train.types import TextBatch


class Perplexity(Measure):
    """`val/perplexity` and `val/perplexity_ema`: exp of the mean negative log-likelihood of the targets, in nats.

    Every token counts as much as its weight, whatever the objective averages over, and without the objective's other
    terms (label smoothing, z-loss).
    """

    name = "perplexity"

    def __init__(self, running: Running):
        self._mean = Ratio(running, self.name, negative_log_likelihood)

    def is_due(self, step: int) -> bool:
        return self._mean.is_due(step)

    def __call__(self, evaluated: Evaluated) -> dict[str, float]:
        with np.errstate(over="ignore"):
            return {name: float(np.exp(np.float64(value))) for name, value in self._mean(evaluated).items()}


def negative_log_likelihood(model: Any, batch: TextBatch, first: Any) -> tuple[Any, Any]:
    """The sum over the targets of some rows, and their weight."""
    del first
    x = model(batch.tokens, batch.positions, batch.segments)
    found, weights = model.scores(x[:, :-1], batch.tokens[:, 1:]), batch.weights[:, 1:]
    return -(weights * found.log_prob).sum(), weights.sum()
