"""What every objective promises. Read next: `flow_matching.py`, then `training/step.py` for who calls it."""

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from openpi_train.nn.augment import Augmentation
from openpi_train.objectives.real_time_chunking import sample_towards
from openpi_train.runtime.exits import UsageError
from openpi_train.types import ActionBatch, Observation

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

    def as_evaluated(self, observation: Observation) -> Observation:
        """The observation as held-out evaluation and sampling see it: what training draws takes its fixed form.

        Default: as it is.
        """
        return observation

    def sample_actions(
        self, model: Any, observation: Observation, noise: Float[Array, "b h a"], keys: Key[Array, " b"], num_steps: int
    ) -> Float[Array, "b h a"]:
        """Normalised actions drawn with a model that was trained so, from `noise`, in `num_steps` denoising steps.

        Default: the model's own sampler. `keys`, one per row, are for samplers that draw more noise on their way.
        """
        del keys
        return model.sample_actions(self.as_evaluated(observation), noise, num_steps)

    def check_flow(self) -> None:
        """Raise UsageError where a model trained so has no velocity that real-time chunking could guide."""
        if "velocity" not in self.needs:
            raise UsageError(
                f"real-time chunking guides a flow by its velocity, and {type(self).__name__} trains none; leave out "
                "--real-time-delay, or join chunks with --ensemble"
            )

    def sample_towards(
        self,
        model: Any,
        observation: Observation,
        noise: Float[Array, "b h a"],
        num_steps: int,
        target: Float[Array, "b h a"],
        weights: Float[Array, "b h a"],
    ) -> Float[Array, "b h a"]:
        """As `sample_actions`, guided towards `target` where `weights` says so (`real_time_chunking.py`)."""
        self.check_flow()
        observation = self.as_evaluated(observation)

        def velocity(actions: Float[Array, "b h a"], time: Float[Array, " b"]) -> Float[Array, "b h a"]:
            return model.velocity(observation, actions[:, None], time[:, None])[:, 0].astype(jnp.float32)

        return sample_towards(velocity, noise, num_steps, target, weights)


def element_mask(
    batch: ActionBatch, *, mask_action_dims: bool = False, mask_padded_steps: bool = True
) -> Float[Array, "b h a"]:
    """1 where an element of `actions` counts, else 0. A row without any valid step is filler and never counts.

    Args: whether the dims beyond the robot's own, and the steps outside the episode, are left out.
    """
    steps = batch.action_mask
    if not mask_padded_steps:
        steps = jnp.broadcast_to(steps.any(axis=1, keepdims=True), steps.shape)
    mask = jnp.broadcast_to(steps[:, :, None], batch.actions.shape).astype(jnp.float32)
    return mask * batch.dim_mask[:, None, :] if mask_action_dims else mask


def draw_noise(keys: Key[Array, " b"], *shape: int) -> Float[Array, "b *shape"]:
    """Standard normal noise of this shape for every row."""
    return jax.vmap(lambda key: jax.random.normal(key, shape, jnp.float32))(keys)


def augmented(batch: ActionBatch, augmentation: Augmentation, keys: Key[Array, " b"] | None) -> ActionBatch:
    """The batch with its images changed, each row's by its own key; with `keys` None, as evaluation sees them."""
    return dataclasses.replace(batch, observation=augmentation(batch.observation, keys))
