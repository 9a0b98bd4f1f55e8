"""Open-loop action error: the distance between sampled and recorded chunks. Read next: `closed_loop_success.py`.

Mean squared errors in normalised units over the robot's own dims and the steps inside the episode. The baseline
predicts the mean action of the training data, which a policy learns that ignores its input.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from openpi_train.evaluation.baseline import against_mean_action
from openpi_train.evaluation.measure import Evaluated, EvaluationContext, Measure, TrainerView
from openpi_train.evaluation.sums import Sums
from openpi_train.parallel.params import Params, merge_module
from openpi_train.sampling.action_sampler import sample_keys
from openpi_train.types import ActionBatch

BASELINE = "val/action_mse_of_mean_action"


class ActionError(Measure):
    """`val/action_mse`, `train/action_mse`, their `_ema` forms, and `val/action_mse_of_mean_action`."""

    name = "open loop"

    def __init__(
        self,
        running: EvaluationContext,
        num_sample_steps: int,
        mean_action: np.ndarray,
        train_batches: Sequence[object] = (),
    ):
        """`mean_action` [a] is the training data's, normalised; `train_batches` are fixed rows of the training split,
        the same at every evaluation."""
        trainer, self._mean_action = running.trainer, mean_action
        self._batches = {"val": running.held_out, "train": train_batches}
        programs = {
            "moments": lambda batch, index: _moments(batch),
            "action error": functools.partial(action_error, trainer, num_sample_steps),
        }
        self._sum = Sums(programs, running)

    def is_due(self, step: int) -> bool:
        del step
        return bool(self._batches["val"])

    def __call__(self, evaluated: Evaluated) -> dict[str, float]:
        values = {}
        for suffix, params in evaluated.weights.items():
            for split, batches in self._batches.items():
                if batches:
                    error, count = self._sum("action error", params, evaluated.frozen, batches=batches)
                    values[f"{split}/action_mse{suffix}"] = float(error / count)
        return {**values, BASELINE: self._baseline()}

    def change(self, first: Mapping[str, float], last: Mapping[str, float]) -> str | None:
        name = "val/action_mse_ema" if "val/action_mse_ema" in last else "val/action_mse"
        if not (name in first and name in last):
            return None
        before, after, constant = (math.sqrt(max(value, 0.0)) for value in (first[name], last[name], last[BASELINE]))
        return (
            f"open-loop action error (root mean square, normalised): {before:.4f} before, {after:.4f} after, "
            f"{constant:.4f} by the mean action; {against_mean_action(after, constant).words}"
        )

    def _baseline(self) -> float:
        count, total, squares = self._sum("moments", batches=self._batches["val"])
        mean = self._mean_action
        return float((squares - 2 * mean * total + mean**2 * count).sum() / count.sum())


def action_error(
    trainer: TrainerView, num_steps: int, params: Params, frozen: Params, batch: ActionBatch, index: jax.Array
):
    """Sum and count of the squared errors over the batch of held-out rows with this index."""

    def share(params, batch, start):
        model: Any = merge_module(trainer.graphdef, params)
        keys = sample_keys(trainer.seed, start + batch.row)
        chunk = batch.actions.shape[1:]
        actions = trainer.objective.action_sampler.chunks(model, batch.observation, keys, num_steps, chunk)
        mask = _own_elements(batch)
        return (mask * jnp.square(actions.astype(jnp.float32) - batch.actions)).sum(), mask.sum()

    return trainer.devices.sum(share, {**frozen, **params}, batch, index * len(batch.row))


def _own_elements(batch: ActionBatch):
    """A mask: 1 on the robot's own dims of steps inside the episode."""
    return (batch.action_mask[:, :, None] & batch.dim_mask[:, None, :]).astype(jnp.float32)


def _moments(batch: ActionBatch):
    mask = _own_elements(batch)
    return tuple((mask * batch.actions**power).sum((0, 1)) for power in (0, 1, 2))
