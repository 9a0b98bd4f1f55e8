"""Noise schedules of diffusion policies, and the sampling steps of DDPM and DDIM.

Results equal those of diffusers' `DDPMScheduler` and `DDIMScheduler` (0.42.1; Ho et al. 2020, Nichol & Dhariwal 2021,
Song et al. 2021) with diffusion_policy's settings: `variance_type` fixed_small, `timestep_spacing` leading, offset
0, `set_alpha_to_one`, eta 0. Read next: `denoising.py`, and `objectives/diffusion.py`, which trains with it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from openpi_train.sampling.action_sampler import Chain, walk

Numbers = Float[Array | np.ndarray, "..."]
Prediction = Literal["epsilon", "sample", "v_prediction"]

# Maximum beta in squaredcos_cap_v2: the share of the signal's variance that one step removes.
_MOST_BETA = 0.999
# For squaredcos_cap_v2: prevents too small first steps (Nichol & Dhariwal 2021, section 3.2).
_COSINE_OFFSET = 0.008


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoiseSchedule:
    """Diffusion steps, from 0 (little noise) to `num_train_timesteps` - 1, and what the network predicts at each.

    `clip_sample` limits every estimate of the clean actions to [-clip_sample_range, clip_sample_range]: right for
    actions that are normalised by their minimum and maximum, wrong for others.
    """

    # Number of diffusion steps in training.
    num_train_timesteps: int = 100
    # Schedule of the noise level.
    beta_schedule: Literal["squaredcos_cap_v2", "linear"] = "squaredcos_cap_v2"
    # First beta of the linear schedule.
    beta_start: float = 0.0001
    # Last beta of the linear schedule.
    beta_end: float = 0.02
    # What the network predicts: the noise, the clean actions, or the velocity of Salimans & Ho 2022.
    prediction_type: Prediction = "epsilon"
    # Limit estimates of the clean actions while sampling.
    clip_sample: bool = True
    # Limit of these estimates.
    clip_sample_range: float = 1.0

    def __post_init__(self):
        if self.num_train_timesteps < 1 or not 0 < self.beta_start <= self.beta_end < 1 or self.clip_sample_range <= 0:
            raise ValueError(
                f"num_train_timesteps {self.num_train_timesteps} must be at least 1, clip_sample_range "
                f"{self.clip_sample_range} above 0, and 0 < beta_start {self.beta_start} <= beta_end {self.beta_end}"
                " < 1"
            )

    @property
    def betas(self) -> np.ndarray:
        """The fraction of the variance that each step replaces by noise, float64 [num_train_timesteps]."""
        count = self.num_train_timesteps
        if self.beta_schedule == "linear":
            return np.linspace(self.beta_start, self.beta_end, count)
        angle = (np.arange(count + 1) / count + _COSINE_OFFSET) / (1 + _COSINE_OFFSET) * np.pi / 2
        kept = np.cos(angle) ** 2
        return np.minimum(1 - kept[1:] / kept[:-1], _MOST_BETA)

    @functools.cached_property
    def alphas_cumprod(self) -> np.ndarray:
        """The fraction of the clean actions' variance that remains at each step, float64 [num_train_timesteps]."""
        return np.cumprod(1 - self.betas)

    def add_noise(
        self, actions: Float[Array, "b ..."], noise: Float[Array, "b ..."], step: Int[Array, "b ..."]
    ) -> Float[Array, "b ..."]:
        """`actions` with the noise of a diffusion step; `step` has their leading axes."""
        signal, spread = self._scales(step, noise.ndim)
        return signal * actions + spread * noise

    def target(
        self, actions: Float[Array, "b ..."], noise: Float[Array, "b ..."], step: Int[Array, "b ..."]
    ) -> Float[Array, "b ..."]:
        """The training target of the network at this step."""
        signal, spread = self._scales(step, noise.ndim)
        match self.prediction_type:
            case "epsilon":
                return noise
            case "sample":
                return jnp.broadcast_to(actions, noise.shape)
            case "v_prediction":
                return signal * noise - spread * actions

    def _scales(self, step: Array, ndim: int) -> tuple[Array, Array]:
        """The factors of actions and noise at each step."""
        kept = jnp.asarray(self.alphas_cumprod, jnp.float32)[step]
        left = jnp.asarray(1 - self.alphas_cumprod, jnp.float32)[step]
        shape = (*step.shape, *[1] * (ndim - step.ndim))
        return jnp.sqrt(kept).reshape(shape), jnp.sqrt(left).reshape(shape)

    def steps(self, num_steps: int) -> np.ndarray:
        """The diffusion steps of a sampler of `num_steps`, int32, descending, evenly spread. Raises ValueError."""
        if not 1 <= num_steps <= self.num_train_timesteps:
            raise ValueError(
                f"{num_steps} sampling steps (--eval.num-sample-steps) for a schedule with {self.num_train_timesteps}: "
                f"give 1 to {self.num_train_timesteps}"
            )
        return (np.arange(num_steps, dtype=np.int32) * (self.num_train_timesteps // num_steps))[::-1]

    def ddpm(self, num_steps: int) -> "SamplerCoefficients":
        """DDPM's walk from noise to actions in `num_steps` steps; each except the last adds noise again."""
        kept, before, back = self._kept(num_steps)
        ratio = kept / before
        variance = np.where(back >= 0, np.maximum((1 - before) / (1 - kept) * (1 - ratio), 1e-20), 0.0)
        clean, noisy = np.sqrt(before) * (1 - ratio) / (1 - kept), np.sqrt(ratio) * (1 - before) / (1 - kept)
        return self._walk(num_steps, kept, clean, noisy, np.zeros_like(kept), np.sqrt(variance))

    def ddim(self, num_steps: int) -> "SamplerCoefficients":
        """DDIM's walk: deterministic, along the line given by the current estimates of actions and noise."""
        kept, before, _ = self._kept(num_steps)
        zeros = np.zeros_like(kept)
        return self._walk(num_steps, kept, np.sqrt(before), zeros, np.sqrt(1 - before), zeros)

    def _kept(self, num_steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`alphas_cumprod` at each step and at the next one, and the next step, negative if there is none."""
        steps = self.steps(num_steps)
        back = steps - self.num_train_timesteps // num_steps
        kept = self.alphas_cumprod
        return kept[steps], np.where(back >= 0, kept[np.maximum(back, 0)], 1.0), np.where(steps > 0, back, -1)

    def _walk(self, num_steps: int, kept: np.ndarray, *factors: np.ndarray) -> "SamplerCoefficients":
        signal, spread = np.sqrt(kept), np.sqrt(1 - kept)
        match self.prediction_type:
            case "epsilon":
                estimate = [1 / signal, -spread / signal, np.zeros_like(kept), np.ones_like(kept)]
            case "sample":
                estimate = [np.zeros_like(kept), np.ones_like(kept), 1 / spread, -signal / spread]
            case "v_prediction":
                estimate = [signal, -spread, spread, signal]
        limit = self.clip_sample_range if self.clip_sample else None
        table = np.stack([*estimate, *factors], axis=1)
        return SamplerCoefficients(steps=self.steps(num_steps), table=table, limit=limit)


@dataclasses.dataclass(frozen=True)
class SamplerCoefficients:
    """The steps of a sampler, each linear in the noisy actions and the prediction except for clipping.

    Columns of `table` [steps, 8] are coefficients: of the noisy actions and the prediction in the estimate of the
    actions, and in that of the noise; then, in the next actions, of the clipped estimate of the actions, the noisy
    actions, the estimate of the noise, and fresh noise.
    """

    steps: np.ndarray
    table: np.ndarray
    limit: float | None

    def step(self, row: Numbers, noisy: Numbers, prediction: Numbers, noise: Numbers) -> Numbers:
        """The actions after the step of this row of `table`. The estimate of the noise is not affected by clipping."""
        clean = row[0] * noisy + row[1] * prediction
        if self.limit is not None:
            clean = clean.clip(-self.limit, self.limit)
        eps = row[2] * noisy + row[3] * prediction
        return row[4] * clean + row[5] * noisy + row[6] * eps + row[7] * noise

    def walk(
        self,
        predict: Callable[[Array, Array], Array],
        start: Float[Array, "b h a"],
        draw: Callable[[Array], Array],
        keep: bool = False,
    ) -> Chain:
        """The chain of all steps from `start`; without `keep` only its end.

        `predict(noisy, step)` calls the network, `draw(index)` returns fresh noise.
        """
        table, fresh = jnp.asarray(self.table, jnp.float32), self.table[:, 7].any()

        def step(noisy, index, visited):
            noise = draw(index) if fresh else jnp.zeros_like(noisy)
            after: Any = self.step(table[index], noisy, predict(noisy, visited), noise)
            return after

        return walk(step, start, self.steps.astype(np.float32), keep)
