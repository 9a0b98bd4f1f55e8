"""The interface of objectives. There is no registry: an experiment has its objective as a value.

Read next: `flow_matching.py`, then `training/step.py`, the caller.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from openpi_train.nn.augment import Augmentation
from openpi_train.sampling.action_sampler import ActionSampler, OwnSampler
from openpi_train.sampling.flow import FlowSampler
from openpi_train.types import ActionBatch, Batch

Norms = dict[str, Float[Array, ""]]
Metrics = dict[str, Float[Array, ""]]
# (function of a model and rows, rows) -> the function's results, with all rows on the first axis.
RowValues = Callable[[Callable[[Any, Any], Any], Any], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective(abc.ABC):
    """A loss that is a sum of `c * numerator / norm`, where norms are computed from masks of the whole optimizer batch.

    Losses and gradients of micro-batches therefore add up: accumulation, devices and sharding cannot change them.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    # The kinds of rows of text data (`TextData.kind`) that it can be trained on; empty: not said.
    text_kinds: ClassVar[tuple[str, ...]] = ()
    # Whether it uses the margins of preferences (`PreferenceBatch.margin`).
    uses_margins: ClassVar[bool] = False
    # What the rows of robot data must be labelled with (`DataConfig.label`); None: with nothing.
    label: ClassVar[Literal["return", "indicator"] | None] = None
    # Whether it learns from the policy's own rollouts (`PolicyObjective`).
    learns_from_rollouts: ClassVar[bool] = False

    def check(self) -> list[str]:
        """Invalid settings, as sentences that name the flag to change (default: none)."""
        return []

    @property
    def needed(self) -> frozenset[str]:
        """What the model must provide: `needs`, and what the fields of this objective ask for."""
        return self.needs

    @property
    def reads_reference(self) -> bool:
        """Whether it reads the reference's log-probabilities from the batches."""
        return False

    @property
    def draws_per_row(self) -> int:
        """How many times the action part of the model runs for one row (for cost forecasts)."""
        return 1

    @property
    def longest_prefix(self) -> int:
        """The largest number of clean actions at the start of a chunk that the model is trained to continue."""
        return 0

    @abc.abstractmethod
    def norms(self, batch: Batch) -> Norms:
        """The denominators, float32 scalars, from masks alone, on the whole optimizer batch."""

    def prepared(self, batch: Batch, values_of: RowValues) -> Batch:
        """The batch with whatever else the loss of a row depends on: values of other rows (default: nothing).

        It is called once per optimizer batch, before the micro-batches are cut. `values_of(function, rows)` runs
        `function(model, rows)` without a gradient, micro-batch by micro-batch, and returns its results for all rows.
        In evaluation, "all rows" are those of one held-out batch.
        """
        del values_of
        return batch

    @abc.abstractmethod
    def loss(
        self, model: nnx.Module, batch: Batch, norms: Norms, keys: Key[Array, " b"] | None, train: bool = True
    ) -> tuple[Float[Array, ""], Metrics]:
        """This micro-batch's share of the loss and of each metric (shares add up to the whole batch's value).

        `keys` holds one key per row. `train` switches augmentation; evaluation uses the same formula without it.
        """

    def warnings(self, metrics: Mapping[str, float | None]) -> list[str]:
        """Sentences on what these metrics, means over an interval, say is going wrong (default: none).

        The run logs each sentence once, so a sentence holds no numbers that change.
        """
        del metrics
        return []

    @property
    def action_sampler(self) -> ActionSampler:
        """The sampler of actions for a model trained with this objective.

        Default: Euler steps if a velocity is trained, otherwise the model's own `sample_actions`.
        """
        return FlowSampler() if "velocity" in self.needs else OwnSampler()


def element_mask(
    batch: ActionBatch, *, mask_action_dims: bool = False, mask_padded_steps: bool = True
) -> Float[Array, "b h a"]:
    """1 where an element of `actions` counts, else 0. A row without any valid step is padding and never counts.

    The flags exclude dims beyond the robot's own, and steps outside the episode.
    """
    steps = batch.action_mask
    if not mask_padded_steps:
        steps = jnp.broadcast_to(steps.any(axis=1, keepdims=True), steps.shape)
    mask = jnp.broadcast_to(steps[:, :, None], batch.actions.shape).astype(jnp.float32)
    return mask * batch.dim_mask[:, None, :] if mask_action_dims else mask


def augmented(batch: ActionBatch, augmentation: Augmentation, keys: Key[Array, " b"] | None) -> ActionBatch:
    """The batch with augmented images, with one key per row; with `keys` None, in the form for evaluation."""
    return dataclasses.replace(batch, observation=augmentation(batch.observation, keys))
