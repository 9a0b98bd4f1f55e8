"""`FlowLaw`: chains of a flow with noise at every step, and their log-probabilities. Read next: `flow.py`."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from openpi_train.fields import at_least
from openpi_train.keys import draw_noise, for_purpose
from openpi_train.runtime.exits import UsageError
from openpi_train.sampling.action_sampler import Chain, walk
from openpi_train.sampling.flow import flow_times
from openpi_train.sampling.law import Law, UnitScores
from openpi_train.types import ChainTraces, tree_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlowLaw(Law):
    """Every Euler step draws from a Gaussian. A unit is one denoising step, over all steps and dims of the chunk.

    Padded dims and steps that are not executed count: later denoising steps depend on them.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"velocity"})

    num_steps: int = at_least(1, 10)
    # With drift correction the eta of Flow-SDE; without, the standard deviation at time 1. 0: Euler steps.
    noise: float = at_least(0, 0.5)
    # The mean is corrected so that the noise leaves the distribution of each step as it is (Flow-SDE).
    drift_correction: bool = True
    # The least standard deviation of a step; without drift correction that at time 0.
    least_std: float = 1e-3

    def check(self) -> list[str]:
        if self.noise > 0 and self.least_std > 0:
            return []
        return [f"noise {self.noise} and least_std {self.least_std} must be above 0: without chance nothing is scored"]

    def draw(self, model: Any, observation: Any, noise: Float[Array, "b h a"], keys: Key[Array, " b"]) -> Chain:
        """The chain from `noise`, with one key per row. The observation is as the model sees it."""
        context = model.context(observation)

        def step(noisy, index, time):
            velocity = model.velocity(context, noisy[:, None], time[:, None])[:, 0].astype(jnp.float32)
            mean = self.mean(noisy, velocity, time)
            if not self.noise:
                return mean
            own = jax.vmap(lambda key: jax.random.fold_in(key, index))(for_purpose(keys, "denoising"))
            return mean + self.std(time)[:, None, None] * draw_noise(own, *noisy.shape[1:])

        return walk(step, noise, flow_times(self.num_steps), keep=True)

    @jax.named_scope("law")
    def scores(self, model: Any, traces: ChainTraces) -> UnitScores:
        """The log-probability of every denoising step in one pass of the model, float32."""
        chain = traces.chain
        before, after = chain.noisy[:, :-1], chain.noisy[:, 1:]
        velocity = model.velocity(traces.observation, before, chain.time).astype(jnp.float32)
        std = self.std(chain.time)
        error = (after - self.mean(before, velocity, chain.time)) / std[..., None, None]
        size = np.prod(before.shape[2:])
        constant = jnp.log(std) + 0.5 * np.log(2 * np.pi)
        return tree_of(
            UnitScores,
            log_prob=-0.5 * jnp.square(error).sum(axis=(-2, -1)) - size * constant,
            entropy=size * (constant + 0.5),
        )

    def values(self, model: Any, traces: ChainTraces) -> Float[Array, "b u"]:
        """Raises UsageError: no critic of chains exists."""
        raise UsageError("FlowLaw has no critic: give --objective.value-weight 0")

    def mean(
        self, noisy: Float[Array, "*b h a"], velocity: Float[Array, "*b h a"], time: Float[Array, "*b"]
    ) -> Float[Array, "*b h a"]:
        """The mean of the actions after a step from `noisy`."""
        if self.drift_correction and self.noise:
            at = time[..., None, None]
            half = jnp.square(self._sigma(at)) / (2 * at)
            velocity = velocity + half * (noisy + (1 - at) * velocity)
        return noisy + (-1.0 / self.num_steps) * velocity

    def std(self, time: Float[Array, "*b"]) -> Float[Array, "*b"]:
        """The standard deviation of the actions after a step, at every step at least `least_std`."""
        if self.drift_correction:
            return jnp.maximum(self._sigma(time) * self.num_steps**-0.5, self.least_std)
        return self.least_std + jnp.maximum(self.noise - self.least_std, 0.0) * time

    def _sigma(self, time: Array) -> Array:
        """Flow-SDE's diffusion, which is infinite at time 1: there that of the next step's time."""
        time = jnp.minimum(time, 1 - 1 / self.num_steps)
        return self.noise * jnp.sqrt(time / (1 - time))
