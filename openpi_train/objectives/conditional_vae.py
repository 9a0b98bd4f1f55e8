"""The loss of ACT (Zhao et al. 2023): a conditional variational autoencoder of action chunks.

The mean absolute error of the chunk that is decoded from a drawn latent, plus `kl_weight` times the divergence of the
latent's distribution from a standard normal one (LeRobot's `ACTPolicy.forward`, lerobot 0.6.1). Evaluation computes the
same, without dropout and augmentation. Read next: `models/act/act_network.py`.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from openpi_train.keys import draw_noise, for_purpose
from openpi_train.nn.augment import Augmentation, NoAugmentation
from openpi_train.nn.dropout import RowKeys
from openpi_train.objectives.objective import Metrics, Norms, Objective, augmented, element_mask
from openpi_train.sampling.action_sampler import OwnSampler
from openpi_train.types import ActionBatch, Network


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConditionalVae(Objective):
    """Absolute error of a reconstructed chunk, and the divergence of its latent from a standard normal distribution."""

    needs: ClassVar[frozenset[str]] = frozenset({"reconstruction"})

    # Weight of the divergence.
    kl_weight: float = 10.0
    # Leave out steps outside the episode.
    mask_padded_steps: bool = True
    # Image augmentation in training, and its fixed form in evaluation.
    augmentation: Augmentation = dataclasses.field(default_factory=NoAugmentation)

    def check(self) -> list[str]:
        """Whether `kl_weight` is a weight."""
        if self.kl_weight >= 0:
            return []
        return [f"--objective.kl-weight {self.kl_weight} must be at least 0"]

    @property
    def action_sampler(self) -> OwnSampler:
        return OwnSampler(augmentation=self.augmentation)

    def element_mask(self, batch: ActionBatch) -> Float[Array, "b h a"]:
        """1 where an element of `actions` counts, else 0."""
        return element_mask(batch, mask_padded_steps=self.mask_padded_steps)

    def norms(self, batch: ActionBatch) -> Norms:
        """The numbers of elements that count, and of rows."""
        return {
            "elements": jnp.maximum(self.element_mask(batch).sum(), 1.0),
            "rows": jnp.maximum(_rows(batch).sum(), 1.0),
        }

    def loss(
        self, model: nnx.Module, batch: ActionBatch, norms: Norms, keys: Key[Array, " b"] | None, train: bool = True
    ) -> tuple[Float[Array, ""], Metrics]:
        """This micro-batch's share of the loss, and of its two parts: `l1` and, unweighted, `kl`."""
        assert keys is not None, "a latent is drawn: it needs one key per row"
        module: Any = model
        batch = augmented(batch, self.augmentation, keys if train else None)
        noise = draw_noise(for_purpose(keys, "latent"), module.config.latent_dim)
        return self.loss_at(module, batch, norms, noise, for_purpose(keys, "dropout") if train else None)

    @jax.named_scope("loss")
    def loss_at(
        self, model: Network, batch: ActionBatch, norms: Norms, noise: Float[Array, "b z"], dropout: RowKeys = None
    ) -> tuple[Float[Array, ""], Metrics]:
        """The loss for a given noise of the latent, and without augmentation; `dropout` None drops nothing."""
        chunk, posterior = model.reconstruct(batch.observation, batch.actions, batch.action_mask, noise, dropout)
        error = jnp.abs(chunk.astype(jnp.float32) - batch.actions)
        l1 = (error * self.element_mask(batch)).sum() / norms["elements"]
        if posterior is None:
            return l1, {"loss": l1, "l1": l1}
        mean, log_variance = posterior
        divergence = -0.5 * (1 + log_variance - jnp.square(mean) - jnp.exp(log_variance)).sum(axis=-1)  # b
        kl = (divergence * _rows(batch)).sum() / norms["rows"]
        loss = l1 + self.kl_weight * kl
        return loss, {"loss": loss, "l1": l1, "kl": kl}


def _rows(batch: ActionBatch) -> Float[Array, " b"]:
    """1 where a row counts, 0 where it only fills the batch."""
    return batch.action_mask.any(axis=1).astype(jnp.float32)
