"""`ChainLaw`: laws of actions that are drawn in denoising steps, each from a Gaussian.

Read next: `flow_law.py`, `denoising_law.py`.
"""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from openpi_train.fields import at_least
from openpi_train.keys import draw_noise, for_purpose
from openpi_train.nn.augment import Augmentation, NoAugmentation
from openpi_train.runtime.exits import UsageError
from openpi_train.sampling.action_sampler import Chain, walk
from openpi_train.sampling.law import Law, UnitScores
from openpi_train.types import ChainTraces, Observation, tree_of

Moments = tuple[Float[Array, "b r h a"], Float[Array, "b r"]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainLaw(Law):
    """Every denoising step draws from a Gaussian. A unit is one step, over all steps and dims of the chunk.

    Padded dims and control steps that are not executed count: later denoising steps depend on them.
    """

    # Denoising steps of a chunk.
    num_steps: int = at_least(1, 10)
    # The augmentation that the policy was trained with; it sees its fixed form.
    augmentation: Augmentation = dataclasses.field(default_factory=NoAugmentation)

    @property
    def draws_per_row(self) -> int:
        return self.num_steps

    @abc.abstractmethod
    def times(self) -> Float[np.ndarray, " steps"]:
        """What the model calls the time of each denoising step, float32."""

    @abc.abstractmethod
    def moments(self, model: Any, seen: Any, noisy: Float[Array, "b r h a"], number: Int[Array, "b r"]) -> Moments:
        """Mean and standard deviation of the actions after the denoising step of this number, from those before it.

        `seen` is a context of the model or, in training, an observation; r draws of each row.
        """

    def draw(self, model: Any, observation: Observation, noise: Float[Array, "b h a"], keys: Key[Array, " b"]) -> Chain:
        """The chain from `noise`, with one key per row."""
        context = model.context(self.seen(observation))

        def step(noisy, index, time):
            number = jnp.broadcast_to(index, (len(time), 1))
            mean, std = self.moments(model, context, noisy[:, None], number)
            own = jax.vmap(lambda key: jax.random.fold_in(key, index))(for_purpose(keys, "denoising"))
            return mean[:, 0] + std[..., None] * draw_noise(own, *noisy.shape[1:])

        return walk(step, noise, self.times(), keep=True)

    @jax.named_scope("law")
    def scores(self, model: Any, traces: ChainTraces) -> UnitScores:
        """The log-probability of every denoising step, float32, in one pass of the model over all queries."""
        b, queries = traces.noisy.shape[:2]
        observation, noisy = jax.tree.map(
            lambda leaf: leaf.reshape(b * queries, *leaf.shape[2:]), (traces.observation, traces.noisy)
        )
        before, after = noisy[:, :-1], noisy[:, 1:]
        number = jnp.broadcast_to(jnp.arange(self.num_steps), before.shape[:2])
        mean, std = self.moments(model, self.seen(observation), before, number)
        error = (after - mean) / std[..., None, None]
        size = np.prod(before.shape[2:])
        constant = jnp.log(std) + 0.5 * np.log(2 * np.pi)
        return tree_of(
            UnitScores,
            log_prob=(-0.5 * jnp.square(error).sum(axis=(-2, -1)) - size * constant).reshape(b, -1),
            entropy=(size * (constant + 0.5)).reshape(b, -1),
        )

    def values(self, model: Any, traces: ChainTraces) -> Float[Array, "b u"]:
        """Raises UsageError: no critic of chains exists."""
        raise UsageError(f"{type(self).__name__} has no critic: give --objective.value-weight 0")

    def seen(self, observation: Observation) -> Observation:
        """The observation as the policy sees it."""
        return self.augmentation(observation, None)
