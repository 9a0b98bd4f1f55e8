"""Samplers of diffusion policies: DDPM and DDIM. Read next: `noise_schedule.py`."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from openpi_train.keys import draw_noise, for_purpose
from openpi_train.sampling.action_sampler import ActionSampler, DenoisingModel
from openpi_train.sampling.noise_schedule import NoiseSchedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenoisingSampler(ActionSampler):
    """The sampler `kind` for a noise schedule. DDPM draws fresh noise from the keys, one per row."""

    noise_schedule: NoiseSchedule
    kind: Literal["ddpm", "ddim"]

    def chain(self, model, observation, noise, keys, num_steps, keep=True):
        network: DenoisingModel = model
        context = network.context(self.seen(observation))
        steps = getattr(self.noise_schedule, self.kind)(num_steps)

        def predict(noisy, step):
            return network.denoise(context, noisy[:, None], step[:, None])[:, 0].astype(jnp.float32)

        def draw(index):
            assert keys is not None, "DDPM draws noise and needs one key per row"
            at_step = jax.vmap(lambda key: jax.random.fold_in(key, index))(for_purpose(keys, "denoising"))
            return draw_noise(at_step, *noise.shape[1:])

        return steps.walk(predict, noise, draw, keep)
