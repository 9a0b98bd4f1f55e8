"""Held-out evaluation: the loss on fixed rows, noise and times, and the open-loop action error. Read next: `loop.py`.

Sums and counts are taken over all rows before any division, so that batch size and device count cannot change a value.
Action errors are mean squared errors in normalised units over the robot's own dims and the steps inside the episode;
the baseline predicts, for every dim, the mean of the evaluated actions themselves: the best constant there is.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from openpi_train.data.feed import Feed
from openpi_train.keys import for_purpose, row_keys
from openpi_train.nn.params import Params, merge_module
from openpi_train.training.state import TrainState
from openpi_train.training.step import Trainer
from openpi_train.types import ActionBatch


def held_out_batches(feed: Feed, batch_size: int, num_rows: int) -> list[ActionBatch]:
    """The first `num_rows` rows of a held-out feed, always the same; rows that only fill the last batch are masked."""

    @jax.jit
    def mask_filler(batch: ActionBatch, start) -> ActionBatch:
        real = batch.row + start < num_rows
        return dataclasses.replace(batch, action_mask=batch.action_mask & real[:, None])

    count = -(-num_rows // batch_size)
    return [mask_filler(feed.batch(index), index * batch_size) for index in range(count)]


class _Stopped(Exception):
    """All processes were asked to stop in the middle of an evaluation."""


class Evaluator:
    """Evaluates states on batches that stay on the devices between evaluations."""

    def __init__(
        self,
        trainer: Trainer,
        batches: Iterable[Any],
        num_sample_steps: int,
        stop_requested: Callable[[], bool] = lambda: False,
    ):
        """`batches` are global arrays; rows that only fill the last batch have an all-False `action_mask`.

        `stop_requested` is asked after every batch, equally often on all processes.
        """
        self._trainer = trainer
        self._batches = list(batches)
        self._stop_requested = stop_requested
        self._sum_norms = jax.jit(trainer.objective.norms)
        self._loss = jax.jit(functools.partial(_loss, trainer))
        self._moments = jax.jit(_moments)
        self._action_error = jax.jit(functools.partial(_action_error, trainer, num_sample_steps))

    def __call__(self, state: TrainState) -> dict[str, float]:
        """`val/loss`, `val/action_mse`, their `_ema` forms where the run keeps an average, and the baseline.

        Every process must call it. Empty where there is no held-out row, or where it was to stop before the end.
        """
        if not self._batches:
            return {}
        try:
            return self._values(state)
        except _Stopped:
            return {}

    def _values(self, state: TrainState) -> dict[str, float]:
        values: dict[str, Any] = self._evaluate(state.params, state.frozen)
        if state.ema is not None:
            averaged = self._evaluate(state.ema, state.frozen)
            values |= {f"{name}_ema": value for name, value in averaged.items()}
        if "sample" in self._trainer.model.provides:
            values["val/action_mse_mean_baseline"] = self._baseline()
        return {name: float(value) for name, value in values.items()}

    def _evaluate(self, params: Params, frozen: Params) -> dict[str, Any]:
        norms = jax.tree.map(lambda *each: sum(each), *[self._sum_norms(batch) for batch in self._batches])
        losses = self._over_batches(lambda batch, index: self._loss(params, frozen, batch, norms, index))
        values: dict[str, Any] = {"val/loss": sum(losses)}
        if "sample" in self._trainer.model.provides:
            pairs = self._over_batches(lambda batch, index: self._action_error(params, frozen, batch, index))
            values["val/action_mse"] = sum(error for error, _ in pairs) / sum(count for _, count in pairs)
        return values

    def _over_batches(self, function: Callable[[Any, int], Any]) -> list[Any]:
        """What `function(batch, index)` gives for every batch, one after the other. Raises _Stopped if asked to."""
        results = []
        for index, batch in enumerate(self._batches):
            results.append(jax.block_until_ready(function(batch, index)))
            if self._stop_requested():
                raise _Stopped
        return results

    def _baseline(self) -> float:
        moments = [self._moments(batch) for batch in self._batches]
        count, total, squares = jax.tree.map(lambda *each: sum(each), *moments)
        spread = squares - total**2 / jnp.maximum(count, 1)
        return float(spread.sum() / count.sum())


def _own_elements(batch: ActionBatch):
    """1 on the robot's own dims of steps inside the episode."""
    return (batch.action_mask[:, :, None] & batch.dim_mask[:, None, :]).astype(jnp.float32)


def _loss(trainer: Trainer, params: Params, frozen: Params, batch: Any, norms: Any, index: Any):
    model = merge_module(trainer.graphdef, {**frozen, **params})
    keys = for_purpose(row_keys(trainer.seed, index, batch.row), "validation")
    return trainer.objective.loss(model, batch, norms, keys, train=False)[0]


def _action_error(trainer: Trainer, num_steps: int, params: Params, frozen: Params, batch: ActionBatch, index: Any):
    model: Any = merge_module(trainer.graphdef, {**frozen, **params})
    keys = for_purpose(row_keys(trainer.seed, index, batch.row), "validation/sample")
    noise = jax.vmap(lambda key: jax.random.normal(key, batch.actions.shape[1:], jnp.float32))(keys)
    actions = model.sample_actions(batch.observation, noise, num_steps)
    mask = _own_elements(batch)
    return (mask * jnp.square(actions.astype(jnp.float32) - batch.actions)).sum(), mask.sum()


def _moments(batch: ActionBatch):
    mask = _own_elements(batch)
    return tuple((mask * batch.actions**power).sum((0, 1)) for power in (0, 1, 2))
