"""Flow matching on action chunks: the loss of pi0 and pi0.5. Read next: `models/pi0/pi0.py` for `velocity`.

Time runs from 1 (noise) to 0 (action), as in openpi: x_t = t * noise + (1 - t) * actions, target = noise - actions,
t = 0.001 + 0.999 * Beta(1.5, 1). Where we differ from openpi (`models/pi0.py` at 15a9616): steps beyond the episode's
end do not count, several draws of (noise, t) may share one pass over the images, and the mean is taken over the whole
optimizer batch.

With `max_delay` the model also learns to continue a chunk that is being executed: Black, Ren, Equi, Levine 2025,
"Training-Time Action Conditioning for Efficient Real-Time Chunking" (arXiv:2512.05964). The first d actions are clean,
their time is 0 and they have no loss; d is drawn for each draw of noise. `sampling/real_time_chunking.py` uses it.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from openpi_train.fields import at_least
from openpi_train.keys import draw_noise, for_purpose
from openpi_train.nn.augment import OPENPI, Augmentation, NoAugmentation
from openpi_train.objectives.objective import Metrics, Norms, Objective, augmented, element_mask
from openpi_train.sampling.flow import FlowSampler
from openpi_train.types import ActionBatch, Network


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlowMatching(Objective):
    """Mean squared error of the velocity.

    `num_flow_draws` draws of noise and time per row: the suffix is a small part of pi0's work, so 4 draws cost
    little and quarter that part of the gradient's variance. `mask_action_dims` excludes the dims that only pad the
    robot's actions (openpi counts them). `mask_padded_steps` excludes the steps beyond an episode's end (openpi
    counts them). The mean with `max_delay` is over as many elements as the delays leave on average, since a
    denominator depends on masks alone.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"velocity"})

    # Draws of noise and time per row.
    num_flow_draws: int = 1
    # Leave out dims beyond the robot's own.
    mask_action_dims: bool = False
    # Leave out steps beyond the episode's end.
    mask_padded_steps: bool = True
    # Times are Beta(time_alpha, 1): above 1 they favour the noisy end.
    time_alpha: float = 1.5
    # At most so many actions at a chunk's start are clean in training, as many as a robot executes while the chunk is
    # computed (real-time chunking). For pi0, pi0.5 and SmolVLA.
    max_delay: int = at_least(0, 0)
    # How images are changed.
    augmentation: Augmentation = OPENPI
    # Change training images at all.
    augment: bool = True

    def __post_init__(self):
        if self.num_flow_draws < 1 or self.time_alpha <= 0:
            raise ValueError(
                f"num_flow_draws {self.num_flow_draws} must be at least 1, and time_alpha {self.time_alpha} above 0"
            )

    @property
    def draws_per_row(self) -> int:
        """The flow draws."""
        return self.num_flow_draws

    def element_mask(self, batch: ActionBatch) -> Float[Array, "b h a"]:
        """1 where an element of `actions` counts, else 0."""
        return element_mask(batch, mask_action_dims=self.mask_action_dims, mask_padded_steps=self.mask_padded_steps)

    @property
    def longest_prefix(self) -> int:
        """The largest delay."""
        return self.max_delay

    def norms(self, batch: ActionBatch) -> Norms:
        """Number of elements that count, times the draws per row; with `max_delay` its expectation."""
        mask = self.element_mask(batch)
        if self.max_delay:
            place = jnp.arange(mask.shape[1])
            mask = mask * ((jnp.minimum(place, self.max_delay) + 1) / (self.max_delay + 1))[:, None]
        return {"elements": self.num_flow_draws * jnp.maximum(mask.sum(), 1.0)}

    @jax.named_scope("noise")
    def draw(
        self, batch: ActionBatch, keys: Key[Array, " b"] | None
    ) -> tuple[Float[Array, "b r h a"], Float[Array, "b r *each"]]:
        """Noise and time for every row and draw; with `max_delay` the time of each action, 0 in the prefix."""
        assert keys is not None, "flow matching draws noise: it needs one key per row"

        def time(key):
            # Beta(alpha, 1) has the distribution function x**alpha, inverted here.
            return jax.random.uniform(key, (self.num_flow_draws,), jnp.float32) ** (1 / self.time_alpha)

        noise = draw_noise(for_purpose(keys, "noise"), self.num_flow_draws, *batch.actions.shape[1:])
        times = jax.vmap(time)(for_purpose(keys, "time")) * 0.999 + 0.001
        if not self.max_delay:
            return noise, times

        def delay(key):
            return jax.random.randint(key, (self.num_flow_draws, 1), 0, self.max_delay + 1)

        in_prefix = jnp.arange(noise.shape[2]) < jax.vmap(delay)(for_purpose(keys, "delay"))  # b r h
        return noise, jnp.where(in_prefix, 0.0, times[:, :, None])

    def loss(
        self, model: nnx.Module, batch: ActionBatch, norms: Norms, keys: Key[Array, " b"] | None, train: bool = True
    ) -> tuple[Float[Array, ""], Metrics]:
        """This micro-batch's share of the mean squared velocity error."""
        batch = augmented(batch, self.used_augmentation, keys if train else None)
        noise, time = self.draw(batch, keys)
        return self.loss_at(model, batch, norms, noise, time)

    @property
    def used_augmentation(self) -> Augmentation:
        """`augmentation`, or none without `augment`."""
        return self.augmentation if self.augment else NoAugmentation()

    @property
    def action_sampler(self) -> FlowSampler:
        return FlowSampler(augmentation=self.used_augmentation, max_delay=self.max_delay)

    @jax.named_scope("loss")
    def loss_at(
        self,
        model: Network,
        batch: ActionBatch,
        norms: Norms,
        noise: Float[Array, "b r h a"],
        time: Float[Array, "b r *each"],
    ) -> tuple[Float[Array, ""], Metrics]:
        """The loss for given noise and times, without augmentation."""
        noisy, wanted = self.path(batch.actions, noise, time)
        return self.loss_of(batch, norms, model.velocity(batch.observation, noisy, time), wanted, time)

    def path(
        self, actions: Float[Array, "b h a"], noise: Float[Array, "b r h a"], time: Float[Array, "b r *each"]
    ) -> tuple[Float[Array, "b r h a"], Float[Array, "b r h a"]]:
        """The position x_t of the flow from noise to actions at these times, and its velocity."""
        actions = actions[:, None]  # b 1 h a
        t = time.reshape(*time.shape, *[1] * (4 - time.ndim))
        return t * noise + (1 - t) * actions, noise - actions

    def loss_of(
        self,
        batch: ActionBatch,
        norms: Norms,
        velocity: Float[Array, "b r h a"],
        wanted: Float[Array, "b r h a"],
        time: Float[Array, "b r *each"] | None = None,
    ) -> tuple[Float[Array, ""], Metrics]:
        """The loss for given velocities. Of times of each action, those that are 0 are a prefix, which has no loss."""
        error = jnp.square(velocity.astype(jnp.float32) - wanted)  # b r h a
        mask = self.element_mask(batch)[:, None]
        if time is not None and time.ndim == 3:
            mask = mask * (time > 0)[..., None]
        loss = (error * mask).sum() / norms["elements"]
        return loss, {"loss": loss}
