"""`FlowDistribution`: chains of a flow with noise at every step, and their log-probabilities. Read next: `flow.py`."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from openpi_train.fields import at_least
from openpi_train.sampling.action_sampler import ActionSampler
from openpi_train.sampling.chain_distribution import ChainDistribution, Moments
from openpi_train.sampling.flow import FlowSampler, flow_times
from openpi_train.sampling.indicator import check_guidance, conditioned_velocity, velocities_per_draw
from openpi_train.types import Network, Tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlowDistribution(ChainDistribution):
    """Every Euler step of a flow draws from a Gaussian."""

    needs: ClassVar[frozenset[str]] = frozenset({"velocity"})

    # With drift correction the eta of Flow-SDE; without, the standard deviation at time 1. 0: Euler steps.
    noise: float = at_least(0, 0.5)
    # The mean is corrected so that the noise leaves the distribution of each step as it is (Flow-SDE).
    drift_correction: bool = True
    # The least standard deviation of a step; without drift correction that at time 0.
    least_std: float = 1e-3
    # Guidance by the indicator of a model that has one (`indicator.py`); None: it has none.
    guidance: float | None = None

    def check(self) -> list[str]:
        problems = check_guidance("guidance", self.guidance)
        if self.noise > 0 and self.least_std > 0:
            return problems
        return [
            *problems,
            f"noise {self.noise} and least_std {self.least_std} must be above 0: without chance nothing is scored",
        ]

    @property
    def needed(self) -> frozenset[str]:
        return self.needs if self.guidance is None else self.needs | {"indicator"}

    @property
    def draws_per_row(self) -> int:
        return self.num_steps * velocities_per_draw(self.guidance)

    @property
    def action_sampler(self) -> ActionSampler:
        return FlowSampler(augmentation=self.augmentation, guidance=self.guidance)

    def times(self) -> Float[np.ndarray, " steps"]:
        return flow_times(self.num_steps)

    def moments(self, model: Network, seen: Tree, noisy: Float[Array, "b r h a"], number: Int[Array, "b r"]) -> Moments:
        time = jnp.asarray(self.times())[number]
        velocity = conditioned_velocity(model, seen, noisy, time, self.guidance)
        return self.mean(noisy, velocity, time), self.std(time)

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
        """The standard deviation of the actions after a step, at every step at least `least_std`; 0 without noise."""
        if not self.noise:
            return jnp.zeros_like(time)
        if self.drift_correction:
            return jnp.maximum(self._sigma(time) * self.num_steps**-0.5, self.least_std)
        return self.least_std + jnp.maximum(self.noise - self.least_std, 0.0) * time

    def _sigma(self, time: Array) -> Array:
        """Flow-SDE's diffusion, which is infinite at time 1: its denominator there is that of the next step's time.

        So do Flow-GRPO's `sde_step_with_logprob` and RLinf's `sample_mean_var`.
        """
        return self.noise * jnp.sqrt(time / (1 - jnp.minimum(time, 1 - 1 / self.num_steps)))
