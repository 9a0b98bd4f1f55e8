"""A flow policy whose every answer is known: actions that are independent and normal, with the state as their mean."""

import dataclasses
import zlib
from typing import ClassVar

import following
import jax
import jax.numpy as jnp
import numpy as np
import toy
from flax import nnx

from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.parallel.mesh import make_mesh
from openpi_train.parallel.strategy import Plan
from openpi_train.policy.observation import ObservationForm
from openpi_train.policy.policy import Policy
from openpi_train.policy.sampler import Sampler

SEED, NUM_STEPS, HORIZON = 3, 10, 5


class Gaussian(nnx.Module):
    """The exact flow of actions that are independent and normal, with the state as their mean and one spread."""

    def __init__(self, config, rngs):
        self.spread = nnx.Param(jnp.full(1, 0.5))

    def context(self, observation):
        return observation

    def velocity(self, observation, noisy, time):
        t = time[..., None] if time.ndim == 3 else time[:, :, None, None]
        mean = observation.state[:, None, None]
        slope = (1 - t) * self.spread[...] ** 2 / ((1 - t) ** 2 * self.spread[...] ** 2 + t**2)
        return (noisy - mean - slope * (noisy - (1 - t) * mean)) / t


@dataclasses.dataclass(frozen=True, kw_only=True)
class GaussianConfig(toy.LinearConfig):
    provides: ClassVar[frozenset[str]] = frozenset({"velocity", "sample", "action_times"})

    def build(self, rngs):
        return Gaussian(self, rngs)


def noise_of(seed, draw, shape):
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 0), draw)
    return np.asarray(jax.random.normal(jax.random.fold_in(key, zlib.crc32(b"validation/sample")), shape), np.float64)


def guided(noise, mean, target, weights, num_steps, most=5.0):
    """Real-time chunking's equations 2 to 5 for this flow, whose destination is linear in the noisy actions."""
    x = noise
    for number in range(num_steps):
        t = 1 - number / num_steps
        slope = (1 - t) * 0.25 / ((1 - t) ** 2 * 0.25 + t**2)
        destination = mean + slope * (x - (1 - t) * mean)
        strength = most if t == 1 else min(most, (t**2 + (1 - t) ** 2) / (t * (1 - t)))
        x = x - ((x - destination) / t - strength * slope * weights * (target - destination)) / num_steps
    return x


def gaussian_policy(objective=None, batch_sizes=(2,)):
    """`following.Follower` with this flow: a policy of two dims, in chunks of five actions."""
    sampler = Sampler(
        model=GaussianConfig(action_dim=following.MODEL_DIMS, action_horizon=HORIZON),
        objective=objective or FlowMatching(augment=False),
        params={"spread": jnp.full(1, 0.5)},
        plan=Plan(mesh=make_mesh(1, jax.devices()[:1]), strategy="replicated"),
        cameras=(),
        seed=SEED,
        num_steps=NUM_STEPS,
        batch_sizes=batch_sizes,
        text_lengths=None,
    )
    spec = sampler.row_spec()

    def unread(row):
        return row | {name: np.ones(*spec[name]) for name in ("prompt_tokens", "prompt_mask")}

    translation = following.translation(sampler.model.rows.window)
    translation = dataclasses.replace(translation, spec=spec, transforms=(*translation.transforms, unread))
    form = ObservationForm(robot=translation.robot, window=translation.window, image_size=(0, 0), reads_prompt=False)
    return Policy(sampler=sampler, form=form, translation=translation, experiment="gaussian", checkpoint="")
