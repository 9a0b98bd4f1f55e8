"""A policy small enough for exact checks: a linear velocity, built through the same interfaces as pi0."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from openpi_train.models.base import ModelConfig
from openpi_train.types import ActionBatch, Observation


class LinearPolicy(nnx.Module):
    """velocity = noisy_actions @ kernel + state @ state_kernel + time * bias."""

    def __init__(self, config, rngs):
        def normal(*shape):
            return nnx.Param(0.3 * jax.random.normal(rngs.params(), shape))

        self.kernel = normal(config.action_dim, config.action_dim)
        self.state_kernel = normal(config.action_dim, config.action_dim)
        self.bias = normal(config.action_dim)
        self.adapter_lora = normal(config.action_dim, config.action_dim)

    def velocity(self, observation, noisy_actions, time):
        state = observation.state @ (self.state_kernel[...] + self.adapter_lora[...])
        return noisy_actions @ self.kernel[...] + state[:, None, None] + time[:, :, None, None] * self.bias[...]

    def sample_actions(self, observation, noise, num_steps):
        actions = noise
        for index in range(num_steps):
            time = jnp.full((noise.shape[0], 1), 1 - index / num_steps)
            actions = actions - self.velocity(observation, actions[:, None], time)[:, 0] / num_steps
        return actions


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearConfig(ModelConfig):
    """Builds `LinearPolicy`."""

    provides: ClassVar[frozenset[str]] = frozenset({"velocity", "sample"})
    action_dim: int = 4
    action_horizon: int = 3
    vocab_size: int = 1
    low_rank: bool = False

    def build(self, rngs):
        return LinearPolicy(self, rngs)

    def batch_spec(self, batch_size, cameras):
        return jax.eval_shape(lambda: batch(batch_size, self.action_horizon, self.action_dim))

    def transforms(self, tokenizer):
        return ()

    def flops_per_row(self, cameras, draws=1):
        return 4.0 * self.action_dim**2 * self.action_horizon * draws

    def activation_bytes_per_row(self, cameras, draws=1):
        return 4.0 * self.action_dim * self.action_horizon * draws

    def frozen(self, path):
        return self.low_rank and path != "adapter_lora"


def batch(size: int, horizon: int = 3, dims: int = 4, seed: int = 0, ragged: bool = True) -> ActionBatch:
    """Random rows; with `ragged`, rows lose 0, 1, 2, ... steps at the episode's end."""
    rng = np.random.default_rng(seed)
    lost = np.arange(size) % horizon if ragged else np.zeros(size, int)
    return ActionBatch(
        observation=Observation(
            images={},
            image_masks={},
            state=jnp.asarray(rng.normal(size=(size, dims)), jnp.float32),
            prompt_tokens=jnp.zeros((size, 1), jnp.int32),
            prompt_mask=jnp.ones((size, 1), bool),
        ),
        actions=jnp.asarray(rng.normal(size=(size, horizon, dims)), jnp.float32),
        action_mask=jnp.asarray(np.arange(horizon) < horizon - lost[:, None]),
        dim_mask=jnp.asarray(np.broadcast_to(np.arange(dims) < dims - 1, (size, dims))),
        row=jnp.arange(size, dtype=jnp.int32),
    )
