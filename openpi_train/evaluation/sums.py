"""Sums over held-out batches, by programs that are compiled once, and measures that are ratios of two sums.

Read next: `held_out_loss.py`, `action_error.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Key

from openpi_train.evaluation.measure import Evaluated, EvaluationContext, Measure, TrainerView
from openpi_train.keys import for_purpose, row_keys
from openpi_train.parallel.params import Params, merge_module
from openpi_train.runtime import agree
from openpi_train.runtime.preempt import StoppedError
from openpi_train.types import Batch, Tree


class CompiledPrograms:
    """Functions by name, each compiled once for inputs with the same shardings. All processes call the same ones."""

    def __init__(self, functions: Mapping[str, Callable[..., object]]):
        self._functions = functions
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(self, name: str, *inputs: Tree) -> Any:
        """The function's result, on the devices."""
        key = (name, *(leaf.sharding for leaf in jax.tree.leaves(inputs) if isinstance(leaf, jax.Array)))
        if key not in self._compiled:
            self._compiled[key] = jax.jit(self._functions[name]).lower(*inputs).compile()
            # gloo times out on processes that compile for 30 s longer than others.
            agree.gather(f"compiled the {name}", None)
        return self._compiled[key](*inputs)


class Sums:
    """Sums of programs by name, each a function of arguments, a batch and the batch's index."""

    def __init__(self, functions: Mapping[str, Callable[..., object]], running: EvaluationContext):
        self._programs, self._stop_requested = CompiledPrograms(functions), running.stop_requested

    def __call__(self, name: str, *arguments: Tree, batches: Sequence[Batch]) -> Any:
        """The sum of a program's results over `batches`, in float64 on the host. Raises StoppedError if stopped.

        Waits for each batch: with dozens of programs in flight, CPU devices of several processes deadlock, each waiting
        for a collective that the other has not begun (seen with jax 0.10.2).
        """
        parts = []
        for index, batch in enumerate(batches):
            parts.append(jax.device_get(self._programs(name, *arguments, batch, np.int32(index))))
            if self._stop_requested():
                raise StoppedError
        return jax.tree.map(lambda *each: np.sum(each, axis=0, dtype=np.float64), *parts)


def numbered_keys(trainer: TrainerView, batch: Batch, start: ArrayLike, purpose: str) -> Key[Array, " b"]:
    """A key per row, from its number among all held-out rows at any batch size; `start` is the number of row 0."""
    return for_purpose(row_keys(trainer.seed, 0, start + batch.row), purpose)


class Ratio(Measure):
    """The ratio of two sums over held-out rows, `val/<name>`; of the average, `val/<name>_ema`. Never due without rows.

    `share(module, batch, first)` returns what some rows add to each sum; `first` is the number of the batch's row 0
    among all held-out rows.
    """

    def __init__(self, running: EvaluationContext, name: str, share: Callable[[Any, Any, Any], tuple[object, object]]):
        self.name, self._trainer, self._share = name, running.trainer, share
        self._batches, self._sum = running.held_out, Sums({name: self._sums}, running)

    def is_due(self, step: int) -> bool:
        del step
        return bool(self._batches)

    def __call__(self, evaluated: Evaluated) -> dict[str, float]:
        values = {}
        for suffix, params in evaluated.weights.items():
            above, below = self._sum(self.name, {**evaluated.frozen, **params}, batches=self._batches)
            values[f"val/{self.name}{suffix}"] = float(above / below)
        return values

    def _sums(self, params: Params, batch: Batch, index: jax.Array) -> Any:
        def share(params, batch, first):
            return self._share(merge_module(self._trainer.graphdef, params), batch, first)

        return self._trainer.devices.sum(share, params, batch, index * len(batch.row))
