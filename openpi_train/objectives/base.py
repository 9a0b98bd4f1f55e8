"""What every objective promises. Read next: `flow_matching.py`, then `training/step.py` for who calls it."""

import abc
import dataclasses
from typing import Any, ClassVar

from flax import nnx
from jaxtyping import Array, Float, Key

from openpi_train.nn.augment import ImageAugmentation
from openpi_train.types import ActionBatch

Norms = dict[str, Float[Array, ""]]
Metrics = dict[str, Float[Array, ""]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective(abc.ABC):
    """A loss that is a sum of `c * numerator / norm`, every norm taken from masks of the whole optimizer batch.

    Micro-batch losses and gradients therefore simply add: accumulation, device count and sharding cannot change them.
    """

    needs: ClassVar[frozenset[str]] = frozenset()

    @property
    def draws_per_row(self) -> int:
        """How many times the action part of the model runs for one row (for cost forecasts)."""
        return 1

    @abc.abstractmethod
    def norms(self, batch: Any) -> Norms:
        """The denominators, float32 scalars, from masks alone, on the whole optimizer batch."""

    @abc.abstractmethod
    def loss(
        self, model: nnx.Module, batch: Any, norms: Norms, keys: Key[Array, " b"] | None, train: bool = True
    ) -> tuple[Float[Array, ""], Metrics]:
        """This micro-batch's share of the loss and of each metric (shares add up to the whole batch's value).

        `keys` holds one key per row. `train` switches augmentation; evaluation uses the same formula without it.
        """


def augmented(batch: ActionBatch, augmentation: ImageAugmentation, keys: Key[Array, " b"] | None) -> ActionBatch:
    """The batch with its images changed, each row's by its own key."""
    assert keys is not None, "changing images draws numbers: it needs one key per row"
    images = augmentation.augment(batch.observation.images, keys)
    return dataclasses.replace(batch, observation=dataclasses.replace(batch.observation, images=images))
