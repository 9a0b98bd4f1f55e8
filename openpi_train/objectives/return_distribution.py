"""The loss of a value function of stored episodes: cross-entropy over bins of the episode's return from each step on.

The value function of RECAP (Physical Intelligence 2025, "pi*0.6: a VLA that learns from experience"). Returns are those
of the stored episodes (`data/robot/labels.py`); nothing is bootstrapped, so values are those of whoever recorded them.
Read next: `nn/return_head.py`; `tools/label_advantages.py`, which makes advantages of the values.
"""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from openpi_train.nn.augment import OPENPI, Augmentation
from openpi_train.nn.return_head import in_bins, mean_return
from openpi_train.objectives.objective import Metrics, Norms, Objective, augmented
from openpi_train.types import ActionBatch, Network


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReturnDistribution(Objective):
    """The mean over rows of the cross-entropy of the returns' distribution. It trains no actions."""

    needs: ClassVar[frozenset[str]] = frozenset({"return_logits"})
    label: ClassVar[Literal["return", "indicator"] | None] = "return"

    # How images are changed.
    augmentation: Augmentation = OPENPI

    def norms(self, batch: ActionBatch) -> Norms:
        """The number of rows that count."""
        return {"rows": jnp.maximum(_counts(batch).sum(), 1.0)}

    @jax.named_scope("loss")
    def loss(
        self, model: nnx.Module, batch: ActionBatch, norms: Norms, keys: Key[Array, " b"] | None, train: bool = True
    ) -> tuple[Float[Array, ""], Metrics]:
        """This micro-batch's share of the cross-entropy, and of the values' mean absolute error."""
        network: Network = model
        assert batch.label is not None, "the experiment has checked that the data have returns"
        observation = augmented(batch, self.augmentation, keys if train else None).observation
        logits = network.return_logits(observation)
        counts = _counts(batch)
        wanted = in_bins(batch.label, logits.shape[-1])
        loss = -(counts[:, None] * wanted * jax.nn.log_softmax(logits, axis=-1)).sum() / norms["rows"]
        error = (counts * jnp.abs(mean_return(logits) - batch.label)).sum() / norms["rows"]
        return loss, {"loss": loss, "value_error": error}


def _counts(batch: ActionBatch) -> Float[Array, " b"]:
    """1 for each row, 0 for those that only fill a batch."""
    return batch.action_mask.any(axis=1).astype(jnp.float32)
