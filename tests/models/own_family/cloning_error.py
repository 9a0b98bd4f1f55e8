"""The objective of behaviour cloning."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from openpi_train.objectives.objective import Objective, element_mask


@dataclasses.dataclass(frozen=True, kw_only=True)
class CloningError(Objective):
    """The mean squared error of the chunk, over the elements that count in the whole optimizer batch."""

    needs: ClassVar[frozenset[str]] = frozenset({"chunk"})

    def norms(self, batch):
        return {"elements": jnp.maximum(element_mask(batch).sum(), 1.0)}

    def loss(self, model, batch, norms, keys, train=True):
        error = jnp.square(model.chunk(batch.observation) - batch.actions) * element_mask(batch)
        loss = error.sum() / norms["elements"]
        return loss, {"loss": loss}
