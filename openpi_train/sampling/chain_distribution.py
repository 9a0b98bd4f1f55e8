"""`ChainDistribution`: distributions of actions that are drawn in denoising steps, each from a Gaussian.

Read next: `flow_distribution.py`, `denoising_distribution.py`.
"""

import abc
import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from openpi_train.fields import at_least
from openpi_train.keys import draw_noise, for_purpose
from openpi_train.sampling.action_distribution import LOG_PROBS, ActionDistribution, AnyArray, Kept, by_query
from openpi_train.sampling.action_sampler import Chain
from openpi_train.sampling.distribution import UnitScores
from openpi_train.types import ChainTraces, Network, Observation, Tree, tree_of

Moments = tuple[Float[Array, "b r h a"], Float[Array, "b r"]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainDistribution(ActionDistribution):
    """Every denoising step draws from a Gaussian. A unit is one step, over the values of the chunk that were executed.

    Those are the robot's own dims of the control steps that took place, as in RLinf (`action_chunk` and
    `action_env_dim`, 5 x 7 in LIBERO) and DPPO (`reward_horizon`): ratios, and so what a clip range means, do not
    depend on padding. It leaves out that later denoising steps also depend on the noise of the other values.
    """

    # Denoising steps of a chunk.
    num_steps: int = at_least(1, 10)
    # What the log-probability of a unit is of those of its values. sum: the probability of all of them, as in RLinf,
    # which clips its ratio at 0.2. mean: as in DPPO, which clips at 0.01, and Flow-GRPO; ratios are then nearer to 1 by
    # as many times as there are values.
    reduction: Literal["sum", "mean"] = "sum"

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
    def moments(self, model: Network, seen: Tree, noisy: Float[Array, "b r h a"], number: Int[Array, "b r"]) -> Moments:
        """Mean and standard deviation of the actions after the denoising step of this number, from those before it.

        `seen` is a context of the model or, in training, an observation; r draws of each row.
        """

    def draw(
        self, model: Network, observation: Observation, noise: Float[Array, "b h a"], keys: Key[Array, " b"]
    ) -> Chain:
        """The chain from `noise`, with one key per row."""
        context, start = model.context(self.seen(observation)), noise.astype(jnp.float32)

        def step(noisy, index):
            mean, std = self.moments(model, context, noisy[:, None], jnp.broadcast_to(index, (len(noisy), 1)))
            own = jax.vmap(lambda key: jax.random.fold_in(key, index))(for_purpose(keys, "denoising"))
            after = mean[:, 0] + std[..., None] * draw_noise(own, *noisy.shape[1:])
            return after, (after, _log_density(after, mean[:, 0], std[:, 0]))

        _, (after, log_probs) = jax.lax.scan(step, start, jnp.arange(self.num_steps))
        return Chain(
            time=jnp.broadcast_to(jnp.asarray(self.times()), (len(start), self.num_steps)),
            noisy=jnp.concatenate([start[:, None], jnp.moveaxis(after, 0, 1)], axis=1),
            log_probs=jnp.moveaxis(log_probs, 0, 1),
        )

    def drawn(self, model, observation, keys, chunk):
        chain = self.draw(model, observation, draw_noise(keys, *chunk), keys)
        return chain.actions, {"noisy": chain.noisy, LOG_PROBS: chain.log_probs}

    def kept_spec(self, chunk: tuple[int, int]) -> dict[str, jax.ShapeDtypeStruct]:
        return {"noisy": jax.ShapeDtypeStruct((self.num_steps + 1, *chunk), jnp.float32)}

    def lengths(self, kept: Kept) -> Int[np.ndarray, " b"]:
        return np.full(len(kept["noisy"]), self.num_steps)

    def sampling_log_probs(self, kept: Kept, is_executed: Bool[np.ndarray, "b h a"]) -> Float[np.ndarray, "b u"]:
        total = (kept[LOG_PROBS] * is_executed[:, None]).sum(axis=(-2, -1))
        return total / self._divisor(is_executed)[:, None]

    def traces(
        self,
        observation: Observation,
        kept: Kept,
        is_executed: AnyArray,
        row: AnyArray,
    ) -> ChainTraces:
        return tree_of(ChainTraces, observation=observation, noisy=kept["noisy"], is_executed=is_executed, row=row)

    @jax.named_scope("distribution")
    def scores(self, model: Network, traces: ChainTraces) -> UnitScores:
        """The log-probability of every denoising step, float32, in one pass of the model over all queries.

        The entropy is reduced as the log-probability is.
        """
        observation, noisy, executed = by_query((traces.observation, traces.noisy, traces.is_executed))
        before, after = noisy[:, :-1], noisy[:, 1:]
        number = jnp.broadcast_to(jnp.arange(self.num_steps), before.shape[:2])
        mean, std = self.moments(model, self.seen(observation), before, number)
        log_probs = jnp.where(executed[:, None], _log_density(after, mean, std), 0.0).sum(axis=(-2, -1))
        # Of one value: (1 + log(2 pi)) / 2 + log(std).
        entropies = executed.sum(axis=(-2, -1))[:, None] * (jnp.log(std) + 0.5 * np.log(2 * np.pi * np.e))
        divisor, b = self._divisor(executed)[:, None], len(traces.noisy)
        return tree_of(
            UnitScores,
            log_prob=(log_probs / divisor).reshape(b, -1),
            entropy=(entropies / divisor).reshape(b, -1),
        )

    def _divisor(self, is_executed: Array | np.ndarray) -> Array | np.ndarray:
        """What sums over a chunk's executed values [b, h, a] are divided by."""
        if self.reduction == "sum":
            return np.ones(1, np.float32)
        return is_executed.sum(axis=(-2, -1)).clip(1)


def _log_density(
    after: Float[Array, "*b h a"], mean: Float[Array, "*b h a"], std: Float[Array, "*b"]
) -> Float[Array, "*b h a"]:
    """The logarithm of the Gaussian density of each value; 0 where there is no chance, at a deviation of 0."""
    scale = jnp.where(std > 0, std, 1.0)[..., None, None]
    found = -0.5 * jnp.square((after - mean) / scale) - jnp.log(scale) - 0.5 * np.log(2 * np.pi)
    return jnp.where(std[..., None, None] > 0, found, 0.0)
