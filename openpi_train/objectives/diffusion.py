"""Denoising diffusion on action chunks: the loss of diffusion policies (Chi et al. 2023).

A diffusion step is drawn uniformly, noise is added to the actions accordingly, and the network predicts the noise (or
the actions, or a velocity); the loss is the mean squared error. Steps outside the episode, which repeat its first or
last action, count, as in diffusion_policy. Read next: `sampling/noise_schedule.py`.
"""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from openpi_train.keys import draw_noise, for_purpose
from openpi_train.nn.augment import Augmentation, NoAugmentation
from openpi_train.objectives.objective import Metrics, Norms, Objective, augmented, element_mask
from openpi_train.sampling.denoising import DenoisingSampler
from openpi_train.sampling.noise_schedule import NoiseSchedule
from openpi_train.types import ActionBatch, Network


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diffusion(Objective):
    """Mean squared error of the network's prediction from noisy actions."""

    needs: ClassVar[frozenset[str]] = frozenset({"denoise"})

    # How noise is added, and what of it is predicted.
    noise_schedule: NoiseSchedule = dataclasses.field(default_factory=NoiseSchedule)
    # How actions are sampled: in all diffusion steps (ddpm), or in few (ddim).
    sampler: Literal["ddpm", "ddim"] = "ddpm"
    # Draws of noise and diffusion step per row, which share one pass over the images.
    num_draws: int = 1
    # Leave out steps outside the episode.
    mask_padded_steps: bool = False
    # Image augmentation in training, and its fixed form in evaluation.
    augmentation: Augmentation = dataclasses.field(default_factory=NoAugmentation)

    def __post_init__(self):
        if self.num_draws < 1:
            raise ValueError(f"num_draws {self.num_draws} must be at least 1")

    @property
    def draws_per_row(self) -> int:
        """The draws of noise and diffusion step."""
        return self.num_draws

    @property
    def action_sampler(self) -> DenoisingSampler:
        return DenoisingSampler(augmentation=self.augmentation, noise_schedule=self.noise_schedule, kind=self.sampler)

    def element_mask(self, batch: ActionBatch) -> Float[Array, "b h a"]:
        """1 where an element of `actions` counts, else 0."""
        return element_mask(batch, mask_padded_steps=self.mask_padded_steps)

    def norms(self, batch: ActionBatch) -> Norms:
        """Number of elements that count, times the draws per row."""
        return {"elements": self.num_draws * jnp.maximum(self.element_mask(batch).sum(), 1.0)}

    def loss(
        self, model: nnx.Module, batch: ActionBatch, norms: Norms, keys: Key[Array, " b"] | None, train: bool = True
    ) -> tuple[Float[Array, ""], Metrics]:
        """This micro-batch's share of the mean squared error."""
        assert keys is not None, "diffusion draws noise: it needs one key per row"
        batch = augmented(batch, self.augmentation, keys if train else None)
        noise = draw_noise(for_purpose(keys, "noise"), self.num_draws, *batch.actions.shape[1:])
        last = self.noise_schedule.num_train_timesteps
        step = jax.vmap(lambda key: jax.random.randint(key, (self.num_draws,), 0, last))(for_purpose(keys, "time"))
        return self.loss_at(model, batch, norms, noise, step)

    @jax.named_scope("loss")
    def loss_at(
        self,
        model: Network,
        batch: ActionBatch,
        norms: Norms,
        noise: Float[Array, "b r h a"],
        step: Int[Array, "b r"],
    ) -> tuple[Float[Array, ""], Metrics]:
        """The loss for given noise and diffusion steps, without augmentation."""
        actions, schedule = batch.actions[:, None], self.noise_schedule  # b 1 h a
        noisy = schedule.add_noise(actions, noise, step)
        predicted = model.denoise(model.context(batch.observation), noisy, step.astype(jnp.float32))
        error = jnp.square(predicted.astype(jnp.float32) - schedule.target(actions, noise, step))  # b r h a
        loss = (error * self.element_mask(batch)[:, None]).sum() / norms["elements"]
        return loss, {"loss": loss}
