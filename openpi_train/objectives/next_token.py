"""Next-token prediction: the loss of pi0-FAST, and of any model that predicts tokens.

Formula: openpi's `models/pi0_fast.py` (`compute_loss`, at 15a9616): the mean over rows of each row's mean of -log p.
Where we differ: the mean is taken over the whole optimizer batch, and padding rows do not count.
Read next: `nn/vocabulary.py`, which computes the log-probabilities.
"""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Key

from openpi_train.nn.augment import OPENPI, Augmentation, NoAugmentation
from openpi_train.objectives.objective import Metrics, Norms, Objective, augmented
from openpi_train.sampling.action_sampler import OwnSampler
from openpi_train.types import ActionBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class NextToken(Objective):
    """Cross entropy of the tokens that `token_loss_mask` marks, each given those before it.

    Calls the model's `token_log_probs(observation)`: for every prompt token but the first, its log-probability
    float32 [b, n], and whether it is the most likely, bool [b, n].
    """

    needs: ClassVar[frozenset[str]] = frozenset({"logits"})

    # Average per row, independent of its number of tokens (openpi), or per token.
    mean_over: Literal["rows", "tokens"] = "rows"
    # How images are changed.
    augmentation: Augmentation = OPENPI
    # Change training images at all.
    augment: bool = True

    def weights(self, batch: ActionBatch) -> Float[Array, "b n"]:
        """Weights of all prompt tokens but the first. A row without any valid step is padding and has weight 0."""
        marked = batch.observation.token_loss_mask
        assert marked is not None, "these rows have no token_loss_mask: their model's `transforms` must make one"
        counts = (marked[:, 1:] & batch.action_mask.any(axis=1, keepdims=True)).astype(jnp.float32)
        return counts if self.mean_over == "tokens" else counts / jnp.maximum(counts.sum(axis=1, keepdims=True), 1.0)

    def norms(self, batch: ActionBatch) -> Norms:
        """Number of tokens that count, or of rows that have such tokens."""
        return {"tokens": jnp.maximum(self.weights(batch).sum(), 1.0)}

    def loss(
        self, model: nnx.Module, batch: ActionBatch, norms: Norms, keys: Key[Array, " b"] | None, train: bool = True
    ) -> tuple[Float[Array, ""], Metrics]:
        """This micro-batch's share of the mean cross entropy, and of the token accuracy."""
        batch = augmented(batch, self.used_augmentation, keys if train else None)
        policy: Any = model
        return self.loss_of(batch, norms, *policy.token_log_probs(batch.observation))

    @property
    def used_augmentation(self) -> Augmentation:
        """`augmentation`, or none without `augment`."""
        return self.augmentation if self.augment else NoAugmentation()

    @property
    def action_sampler(self) -> OwnSampler:
        return OwnSampler(augmentation=self.used_augmentation)

    @jax.named_scope("loss")
    def loss_of(
        self, batch: ActionBatch, norms: Norms, log_probs: Float[Array, "b n"], is_best: Bool[Array, "b n"]
    ) -> tuple[Float[Array, ""], Metrics]:
        """The loss for given log-probabilities."""
        weights = self.weights(batch)
        loss = -(weights * log_probs).sum() / norms["tokens"]
        return loss, {"loss": loss, "token_accuracy": (weights * is_best).sum() / norms["tokens"]}
