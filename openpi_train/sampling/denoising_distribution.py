"""`DenoisingDistribution`: chains of a diffusion policy, drawn and scored by DDPM's posterior (DPPO, Ren et al. 2024).

Read next: `noise_schedule.py`.
"""

import dataclasses
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from openpi_train.sampling.action_sampler import ActionSampler
from openpi_train.sampling.chain_distribution import ChainDistribution, Moments
from openpi_train.sampling.denoising import DenoisingSampler
from openpi_train.sampling.noise_schedule import NoiseSchedule
from openpi_train.types import Network, Observation, Tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenoisingDistribution(ChainDistribution):
    """Every step draws from the Gaussian of DDPM's ancestral sampling, with a floor of its standard deviation.

    The schedule is that of the policy's training. DDPM's last step has no noise: without the floor nothing of it could
    be scored.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"denoise"})

    # How noise was added in training, and what of it the policy predicts.
    noise_schedule: NoiseSchedule = dataclasses.field(default_factory=NoiseSchedule)
    # The least standard deviation of a step (DPPO: 0.1).
    least_std: float = 0.1
    # How actions are sampled without exploring: in evaluations, and by who serves the policy.
    sampler: Literal["ddpm", "ddim"] = "ddim"

    def check(self) -> list[str]:
        problems = []
        if not self.least_std > 0:
            problems.append(f"least_std {self.least_std} must be above 0: the last step has no other noise")
        if self.num_steps > (most := self.noise_schedule.num_train_timesteps):
            problems.append(f"num_steps {self.num_steps} must be at most {most}, the diffusion steps of the schedule")
        return problems

    @property
    def action_sampler(self) -> ActionSampler:
        return DenoisingSampler(augmentation=self.augmentation, noise_schedule=self.noise_schedule, kind=self.sampler)

    def times(self) -> Float[np.ndarray, " steps"]:
        return self.noise_schedule.steps(self.num_steps).astype(np.float32)

    def moments(self, model: Network, seen: Tree, noisy: Float[Array, "b r h a"], number: Int[Array, "b r"]) -> Moments:
        walk = self.noise_schedule.ddpm(self.num_steps)
        table = jnp.asarray(walk.table, jnp.float32)[number]  # b r 8
        context = model.context(seen) if isinstance(seen, Observation) else seen
        predicted = model.denoise(context, noisy, jnp.asarray(self.times())[number]).astype(jnp.float32)
        rows = jnp.moveaxis(table, -1, 0)[..., None, None]  # 8 b r 1 1
        mean: Any = walk.step(rows, noisy, predicted, jnp.zeros_like(noisy))
        return mean, jnp.maximum(table[..., 7], self.least_std)
