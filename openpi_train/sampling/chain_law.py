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
from openpi_train.sampling.action_law import ActionLaw, Kept, by_query
from openpi_train.sampling.action_sampler import Chain, walk
from openpi_train.sampling.law import UnitScores
from openpi_train.types import ChainTraces, Observation, tree_of

Moments = tuple[Float[Array, "b r h a"], Float[Array, "b r"]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainLaw(ActionLaw):
    """Every denoising step draws from a Gaussian. A unit is one step, over all steps and dims of the chunk.

    Padded dims and control steps that are not executed count: later denoising steps depend on them.
    """

    # Denoising steps of a chunk.
    num_steps: int = at_least(1, 10)

    @property
    def draws_per_row(self) -> int:
        return self.num_steps

    @property
    def num_units(self) -> int:
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

    def drawn(self, model, observation, keys, chunk):
        chain = self.draw(model, observation, draw_noise(keys, *chunk), keys)
        return chain.actions, {"noisy": chain.noisy}

    def kept_spec(self, chunk: tuple[int, int]) -> dict[str, jax.ShapeDtypeStruct]:
        return {"noisy": jax.ShapeDtypeStruct((self.num_steps + 1, *chunk), jnp.float32)}

    def lengths(self, kept: Kept) -> Int[np.ndarray, " b"]:
        return np.full(len(kept["noisy"]), self.num_steps)

    def traces(self, observation: Observation, kept: Kept, row: Any) -> ChainTraces:
        return tree_of(ChainTraces, observation=observation, noisy=kept["noisy"], row=row)

    @jax.named_scope("law")
    def scores(self, model: Any, traces: ChainTraces) -> UnitScores:
        """The log-probability of every denoising step, float32, in one pass of the model over all queries."""
        observation, noisy = by_query((traces.observation, traces.noisy))
        before, after = noisy[:, :-1], noisy[:, 1:]
        number = jnp.broadcast_to(jnp.arange(self.num_steps), before.shape[:2])
        mean, std = self.moments(model, self.seen(observation), before, number)
        error = (after - mean) / std[..., None, None]
        size = np.prod(before.shape[2:])
        constant = jnp.log(std) + 0.5 * np.log(2 * np.pi)
        b = len(traces.noisy)
        return tree_of(
            UnitScores,
            log_prob=(-0.5 * jnp.square(error).sum(axis=(-2, -1)) - size * constant).reshape(b, -1),
            entropy=(size * (constant + 0.5)).reshape(b, -1),
        )
