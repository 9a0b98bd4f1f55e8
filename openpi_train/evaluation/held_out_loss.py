"""Held-out loss and metrics on fixed rows, noise and times, of the weights and of their average; perplexity of texts.

Sums and counts are taken over all rows before any division, and a row's noise and time depend only on its number, so
batch size and device count change values only by rounding. Read next: `action_error.py`.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from openpi_train.evaluation.measure import Evaluated, EvaluationContext, Measure, TrainerView
from openpi_train.evaluation.sums import Ratio, Sums, numbered_keys
from openpi_train.objectives.objective import Norms
from openpi_train.parallel.params import Params, merge_module
from openpi_train.types import Batch, Network, TextBatch


class HeldOutLoss(Measure):
    """`val/loss` and the other metrics of the objective's loss, each also `_ema`. Never due if nothing is held out."""

    name = "held-out"

    def __init__(self, running: EvaluationContext):
        trainer, self._batches = running.trainer, running.held_out
        programs = {
            "norms": lambda batch, index: trainer.objective.norms(batch),
            "loss": functools.partial(loss_sums, trainer),
        }
        self._sum = Sums(programs, running)

    def is_due(self, step: int) -> bool:
        del step
        return bool(self._batches)

    def __call__(self, evaluated: Evaluated) -> dict[str, float]:
        sums = self._sum("norms", batches=self._batches)
        norms = {name: np.float32(norm) for name, norm in sums.items()}
        return {
            f"val/{name}{suffix}": float(value)
            for suffix, params in evaluated.weights.items()
            for name, value in self._sum("loss", params, evaluated.frozen, norms, batches=self._batches).items()
        }

    def change(self, first: Mapping[str, float], last: Mapping[str, float]) -> str | None:
        suffix, weights = ("_ema", ", averaged weights") if "val/loss_ema" in last else ("", "")
        name = f"val/loss{suffix}"
        if not (name in first and name in last):
            return None
        return f"held-out loss{weights}: {first[name]:.4f} before, {last[name]:.4f} after"


def loss_sums(
    trainer: TrainerView, params: Params, frozen: Params, norms: Norms, batch: Batch, index: jax.Array
) -> dict[str, Any]:
    """The loss and the metrics of the `index`-th held-out batch, all of them sums over its rows by `norms`."""

    def share(params, batch, rest):
        norms, start = rest
        model = merge_module(trainer.graphdef, params)
        keys = numbered_keys(trainer, batch, start, "validation")
        loss, metrics = trainer.objective.loss(model, batch, norms, keys, train=False)
        return {**metrics, "loss": loss}

    everything, start = {**frozen, **params}, index * len(batch.row)
    batch = trainer.objective.prepared(batch, trainer.devices.row_values(everything))
    return trainer.devices.sum(share, everything, batch, (norms, start))


class Perplexity(Ratio):
    """`val/perplexity` and `val/perplexity_ema`: exp of the mean negative log-likelihood of the targets, in nats.

    Every token counts as much as its weight, whatever the objective averages over, and without the objective's other
    terms (label smoothing, z-loss).
    """

    def __init__(self, running: EvaluationContext):
        super().__init__(running, "perplexity", negative_log_likelihood)

    def __call__(self, evaluated: Evaluated) -> dict[str, float]:
        with np.errstate(over="ignore"):
            return {name: float(np.exp(np.float64(value))) for name, value in super().__call__(evaluated).items()}


def negative_log_likelihood(model: Network, batch: TextBatch, first: jax.Array) -> tuple[Any, Any]:
    """The sum over the targets of some rows, and their weight."""
    del first
    x = model(batch.tokens, batch.positions, batch.segments)
    found, weights = model.scores(x[:, :-1], batch.tokens[:, 1:]), batch.weights[:, 1:]
    return -(weights * found.log_prob).sum(), weights.sum()
