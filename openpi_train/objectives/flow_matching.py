"""Flow matching on action chunks: the loss of pi0 and pi0.5. Read next: `models/pi0/pi0.py` for `velocity`.

Time runs from 1 (noise) to 0 (action), as in openpi: x_t = t * noise + (1 - t) * actions, target = noise - actions,
t = 0.001 + 0.999 * Beta(1.5, 1). Where we differ from openpi (`models/pi0.py` at 15a9616): steps beyond the episode's
end do not count, several draws of (noise, t) may share one pass over the images, and the mean is taken over the whole
optimizer batch.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

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
    counts them).
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

    def norms(self, batch: ActionBatch) -> Norms:
        """Number of elements that count, times the draws per row."""
        return {"elements": self.num_flow_draws * jnp.maximum(self.element_mask(batch).sum(), 1.0)}

    @jax.named_scope("noise")
    def draw(
        self, batch: ActionBatch, keys: Key[Array, " b"] | None
    ) -> tuple[Float[Array, "b r h a"], Float[Array, "b r"]]:
        """Noise and time for every row and draw."""
        assert keys is not None, "flow matching draws noise: it needs one key per row"

        def time(key):
            # Beta(alpha, 1) has the distribution function x**alpha, inverted here.
            return jax.random.uniform(key, (self.num_flow_draws,), jnp.float32) ** (1 / self.time_alpha)

        noise = draw_noise(for_purpose(keys, "noise"), self.num_flow_draws, *batch.actions.shape[1:])
        return noise, jax.vmap(time)(for_purpose(keys, "time")) * 0.999 + 0.001

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
        return FlowSampler(augmentation=self.used_augmentation)

    @jax.named_scope("loss")
    def loss_at(
        self,
        model: Network,
        batch: ActionBatch,
        norms: Norms,
        noise: Float[Array, "b r h a"],
        time: Float[Array, "b r"],
    ) -> tuple[Float[Array, ""], Metrics]:
        """The loss for given noise and times, without augmentation."""
        noisy, wanted = self.path(batch.actions, noise, time)
        return self.loss_of(batch, norms, model.velocity(batch.observation, noisy, time), wanted)

    def path(
        self, actions: Float[Array, "b h a"], noise: Float[Array, "b r h a"], time: Float[Array, "b r"]
    ) -> tuple[Float[Array, "b r h a"], Float[Array, "b r h a"]]:
        """The position x_t of the flow from noise to actions at these times, and its velocity."""
        actions = actions[:, None]  # b 1 h a
        t = time[:, :, None, None]
        return t * noise + (1 - t) * actions, noise - actions

    def loss_of(
        self, batch: ActionBatch, norms: Norms, velocity: Float[Array, "b r h a"], wanted: Float[Array, "b r h a"]
    ) -> tuple[Float[Array, ""], Metrics]:
        """The loss for given velocities."""
        error = jnp.square(velocity.astype(jnp.float32) - wanted)  # b r h a
        loss = (error * self.element_mask(batch)[:, None]).sum() / norms["elements"]
        return loss, {"loss": loss}
