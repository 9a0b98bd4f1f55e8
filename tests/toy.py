"""A policy small enough for exact checks: a linear velocity, built through the same interfaces as pi0."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from openpi_train.data.robot.row_format import RowFormat
from openpi_train.data.robot.windows import WindowShape
from openpi_train.models.compute import Compute
from openpi_train.models.model_config import PolicyConfig
from openpi_train.models.param_rules import ParamRules
from openpi_train.nn.norms import LayerNorm
from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.parallel.layers import scan_layers, stack_layers
from openpi_train.parallel.params import Gathering, ParamKind
from openpi_train.parallel.shard import take_rows
from openpi_train.sampling.action_sampler import OwnSampler
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

    def context(self, observation):
        return observation


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlowThatSamplesItself(FlowMatching):
    """Flow matching of a model that has its own `sample_actions`."""

    augment: bool = False

    @property
    def action_sampler(self):
        return OwnSampler()


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearRows(RowFormat):
    """Those of `batch`."""

    action_dim: int

    def batch_spec(self, batch_size, cameras, text_length=None):
        return jax.eval_shape(lambda: batch(batch_size, self.window.horizon, self.action_dim))

    def transforms(self, tokenizer, text_length=None):
        return ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearConfig(PolicyConfig):
    """Builds `LinearPolicy`."""

    provides: ClassVar[frozenset[str]] = frozenset({"velocity", "sample"})
    action_dim: int = 4
    action_horizon: int = 3
    vocab_size: int = 1
    low_rank: bool = False

    def build(self, rngs):
        return LinearPolicy(self, rngs)

    @property
    def rows(self):
        window = WindowShape(horizon=self.action_horizon)
        return LinearRows(window=window, vocab_size=self.vocab_size, action_dim=self.action_dim)

    @property
    def param_rules(self):
        return ParamRules(frozen=lambda path: self.low_rank and path != "adapter_lora")


class Layer(nnx.Module):
    """One layer of `StackedPolicy`."""

    def __init__(self, width, dtype, rngs):
        self.dense = nnx.Linear(width, width, dtype=dtype, rngs=rngs)
        self.norm = LayerNorm(width)

    def __call__(self, x):
        return x + jnp.tanh(self.dense(self.norm(x)))


class StackedPolicy(nnx.Module):
    """Every way in which a parameter is used: a token table, a stack of layers, a plain weight, vectors."""

    def __init__(self, config, rngs):
        self.dtype, self.remat, width = config.compute.dtype, config.remat, config.width
        table = jax.random.normal(rngs.params(), (config.vocab_size, width))
        setattr(self, config.table, nnx.Param(table, kind=ParamKind(gathering=Gathering.BY_ROW)))
        self.inputs = nnx.Linear(config.action_dim + 1, width, rngs=rngs)
        setattr(self, config.stack, stack_layers(lambda rngs: Layer(width, self.dtype, rngs), config.depth, rngs))
        self.names = config.stack, config.table
        self.outputs = nnx.Linear(width, config.action_dim, rngs=rngs)

    def velocity(self, observation, noisy_actions, time):
        b, r, h, _ = noisy_actions.shape
        stack, table = (getattr(self, name) for name in self.names)
        prompt = take_rows(table.get_value(), observation.prompt_tokens).mean(axis=1)  # b d
        times = jnp.broadcast_to(time[:, :, None, None], (b, r, h, 1))
        x = self.inputs(jnp.concatenate([noisy_actions, times], axis=-1)) + prompt[:, None, None]
        x = x.reshape(b, r * h, -1).astype(self.dtype)
        x, _ = scan_layers(stack, lambda layer, x, _: (layer(x), None), x, remat=self.remat)
        return self.outputs(x.astype(jnp.float32)).reshape(noisy_actions.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackedConfig(LinearConfig):
    """Builds `StackedPolicy`."""

    provides: ClassVar[frozenset[str]] = frozenset({"velocity"})
    vocab_size: int = 40
    width: int = 16
    depth: int = 3
    dtype: str = "float32"
    remat: str = "full"
    stack: str = "layers"
    table: str = "token_embedding"

    @property
    def compute(self):
        return Compute(dtype=jnp.dtype(self.dtype))

    def build(self, rngs):
        return StackedPolicy(self, rngs)


def batch(
    size: int, horizon: int = 3, dims: int = 4, seed: int = 0, ragged: bool = True, vocab_size: int = 1
) -> ActionBatch:
    """Random rows; with `ragged`, rows lose 0, 1, 2, ... steps at the episode's end.

    Made by numpy: each of jax's operations would be compiled for each size.
    """
    rng = np.random.default_rng(seed)
    lost = np.arange(size) % horizon if ragged else np.zeros(size, int)
    return ActionBatch(
        observation=Observation(
            images={},
            image_masks={},
            state=jnp.asarray(rng.normal(size=(size, dims)), jnp.float32),
            prompt_tokens=jnp.asarray(rng.integers(0, 1 << 30, (size, 2)) % vocab_size, jnp.int32),
            prompt_mask=jnp.asarray(np.ones((size, 2), bool)),
        ),
        actions=jnp.asarray(rng.normal(size=(size, horizon, dims)), jnp.float32),
        action_mask=jnp.asarray(np.arange(horizon) < horizon - lost[:, None]),
        dim_mask=jnp.asarray(np.broadcast_to(np.arange(dims) < dims - 1, (size, dims))),
        row=jnp.asarray(np.arange(size), jnp.int32),
    )
