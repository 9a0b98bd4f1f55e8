"""Held-out evaluation: the loss on fixed rows, noise and times, and the open-loop action error. Read next: `loop.py`.

Sums and counts are taken over all rows before any division, and a row's noise and time depend on its number alone, so
that batch size and device count cannot change a value (but for rounding).
Action errors are mean squared errors in normalised units over the robot's own dims and the steps inside the episode;
the baseline predicts, for every dim, the mean of the evaluated actions themselves: the best constant there is.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from openpi_train.data.feed import Feed
from openpi_train.keys import for_purpose, row_keys
from openpi_train.nn.params import Params, merge_module
from openpi_train.sharding.strategy import ON_HOST
from openpi_train.training.agreement import gather
from openpi_train.training.sampling import sample_chunks, sample_keys
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
        train_batches: Iterable[Any] = (),
    ):
        """`batches` are global arrays; rows that only fill the last batch have an all-False `action_mask`.

        Of `train_batches`, rows of the training split, only the action error is measured.
        `stop_requested` is asked after every batch, equally often on all processes.
        """
        self._trainer = trainer
        self._batches, self._train_batches = list(batches), list(train_batches)
        self._stop_requested = stop_requested
        self._programs = {
            "norms": lambda batch, index: trainer.objective.norms(batch),
            "moments": lambda batch, index: _moments(batch),
            "loss": functools.partial(_loss, trainer),
            "action error": functools.partial(_action_error, trainer, num_sample_steps),
        }
        self._compiled: dict[tuple[Any, ...], Any] = {}

    @property
    def has_rows(self) -> bool:
        """Whether anything is held out."""
        return bool(self._batches)

    def __call__(self, state: TrainState) -> dict[str, float]:
        """`val/loss`, `val/action_mse`, `train/action_mse`, their `_ema` forms where the run keeps an average, and
        the baseline.

        Every process must call it. Empty where there is no held-out row, or where it was to stop before the end.
        """
        if not self._batches:
            return {}
        try:
            return self._values(state)
        except _Stopped:
            return {}

    def _values(self, state: TrainState) -> dict[str, float]:
        values = self._evaluate(state.params, state.frozen)
        if state.ema is not None:
            averaged = self._evaluate(self.on_devices(state.ema), state.frozen)
            values |= {f"{name}_ema": value for name, value in averaged.items()}
        if "sample" in self._trainer.model.provides:
            values["val/action_mse_mean_baseline"] = self._baseline()
        return values

    def on_devices(self, params: Params) -> Params:
        """The same parameters, out of host memory where they lie there between steps."""
        plan, key = self._trainer.plan, ("average on the devices",)
        if "ema" not in ON_HOST[plan.offload]:
            return params
        if key not in self._compiled:
            self._compiled[key] = jax.jit(lambda params: params, out_shardings=plan.tree("state", params))
        return self._compiled[key](params)

    def _evaluate(self, params: Params, frozen: Params) -> dict[str, float]:
        norms = {name: np.float32(norm) for name, norm in self._sum("norms").items()}
        values = {"val/loss": float(self._sum("loss", params, frozen, norms))}
        if "sample" in self._trainer.model.provides:
            for split, batches in (("val", self._batches), ("train", self._train_batches)):
                if batches:
                    error, count = self._sum("action error", params, frozen, batches=batches)
                    values[f"{split}/action_mse"] = float(error / count)
        return values

    def _sum(self, name: str, *arguments: Any, batches: Sequence[Any] | None = None) -> Any:
        """The sum of what a program returns over all batches (default: the held-out ones), in float64 on the host.

        Raises _Stopped if asked to.

        Each batch is waited for: with dozens of programs under way, CPU devices of several processes wait for each
        other for ever, each for a collective that the other has not begun (seen with jax 0.10.2).
        """
        parts = []
        for index, batch in enumerate(self._batches if batches is None else batches):
            inputs = (*arguments, batch, np.int32(index))
            parts.append(jax.device_get(self._program(name, inputs)(*inputs)))
            if self._stop_requested():
                raise _Stopped
        return jax.tree.map(lambda *each: np.sum(each, axis=0, dtype=np.float64), *parts)

    def _program(self, name: str, inputs: Any) -> Callable[..., Any]:
        """The program, compiled for inputs that are cut over the devices like these."""
        key = (name, *(leaf.sharding for leaf in jax.tree.leaves(inputs) if isinstance(leaf, jax.Array)))
        if key not in self._compiled:
            self._compiled[key] = jax.jit(self._programs[name]).lower(*inputs).compile()
            gather(f"compiled the {name}", None)  # gloo gives up on processes that compile for 30 s longer than others
        return self._compiled[key]

    def _baseline(self) -> float:
        count, total, squares = self._sum("moments")
        spread = squares - total**2 / np.maximum(count, 1)
        return float(spread.sum() / count.sum())


def _own_elements(batch: ActionBatch):
    """1 on the robot's own dims of steps inside the episode."""
    return (batch.action_mask[:, :, None] & batch.dim_mask[:, None, :]).astype(jnp.float32)


def _keys(trainer: Trainer, batch: Any, start: Any, purpose: str):
    """A key per row by its number among all held-out rows, whatever the batch size; `start` is that of row 0."""
    return for_purpose(row_keys(trainer.seed, 0, start + batch.row), purpose)


def _loss(trainer: Trainer, params: Params, frozen: Params, norms: Any, batch: Any, index: Any):
    def share(params, batch, rest):
        norms, start = rest
        model = merge_module(trainer.graphdef, params)
        keys = _keys(trainer, batch, start, "validation")
        return trainer.objective.loss(model, batch, norms, keys, train=False)[0]

    return trainer.devices.sum(share, {**frozen, **params}, batch, (norms, index * len(batch.row)))


def _action_error(trainer: Trainer, num_steps: int, params: Params, frozen: Params, batch: ActionBatch, index: Any):
    def share(params, batch, start):
        model: Any = merge_module(trainer.graphdef, params)
        keys = sample_keys(trainer.seed, start + batch.row)
        chunk = batch.actions.shape[1:]
        actions = sample_chunks(trainer.objective, model, batch.observation, keys, num_steps, chunk)
        mask = _own_elements(batch)
        return (mask * jnp.square(actions.astype(jnp.float32) - batch.actions)).sum(), mask.sum()

    return trainer.devices.sum(share, {**frozen, **params}, batch, index * len(batch.row))


def _moments(batch: ActionBatch):
    mask = _own_elements(batch)
    return tuple((mask * batch.actions**power).sum((0, 1)) for power in (0, 1, 2))
