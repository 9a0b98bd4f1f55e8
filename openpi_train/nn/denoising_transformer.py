"""The transformer of diffusion policies: actions attend to each other, to the diffusion step and to the observations.

Equal to diffusion_policy's network (`model/diffusion/transformer_for_diffusion.py` at 5ba07ac, with the
step and the observations as condition, causal, and an MLP over the condition), but without dropout.
Read next: `models/diffusion_policy/diffusion_policy_network.py`.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from openpi_train.nn.unet1d import encode_step
from openpi_train.nn.wide_norms import WideLayerNorm
from openpi_train.parallel.layers import scan_layers, stack_layers

_SPREAD = nnx.initializers.normal(0.02)
_linear = functools.partial(nnx.Linear, kernel_init=_SPREAD)


class Attention(nnx.Module):
    """Multi-head attention from `x` to `seen`. The softmax is in float32."""

    def __init__(self, width: int, num_heads: int, *, dtype: DTypeLike | None = None, rngs: nnx.Rngs):
        self.num_heads = num_heads
        self.query = _linear(width, width, dtype=dtype, rngs=rngs)
        self.key = _linear(width, width, dtype=dtype, rngs=rngs)
        self.value = _linear(width, width, dtype=dtype, rngs=rngs)
        self.output = _linear(width, width, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "n h d"], seen: Float[Array, "n t d"], mask: Bool[Array, "h t"]
    ) -> Float[Array, "n h d"]:
        heads = [
            part.reshape(*part.shape[:2], self.num_heads, -1)
            for part in (self.query(x), self.key(seen), self.value(seen))
        ]
        return self.output(jax.nn.dot_product_attention(*heads, mask=mask[None, None]).reshape(x.shape))


class DecoderLayer(nnx.Module):
    """Attention among the actions, then to the condition, then an MLP; each pre-norm, with a skip connection."""

    def __init__(self, width: int, num_heads: int, *, dtype: DTypeLike | None = None, rngs: nnx.Rngs):
        self.norm_1, self.norm_2, self.norm_3 = (WideLayerNorm(width, rngs=rngs) for _ in range(3))
        self.among = Attention(width, num_heads, dtype=dtype, rngs=rngs)
        self.across = Attention(width, num_heads, dtype=dtype, rngs=rngs)
        self.mlp_in = _linear(width, 4 * width, dtype=dtype, rngs=rngs)
        self.mlp_out = _linear(4 * width, width, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "n h d"],
        condition: Float[Array, "n t d"],
        masks: tuple[Bool[Array, "h h"], Bool[Array, "h t"]],
    ) -> Float[Array, "n h d"]:
        normed = self.norm_1(x)
        x = x + self.among(normed, normed, masks[0])
        x = x + self.across(self.norm_2(x), condition, masks[1])
        return x + self.mlp_out(jax.nn.gelu(self.mlp_in(self.norm_3(x)), approximate=False))


class DenoisingTransformer(nnx.Module):
    """As `unet1d.ConditionalUnet1d`, but with one token per action and per step of the observation.

    Args:
        action_dim: dims of an action.
        condition_width: width of the condition of each observation step.
        horizon: steps of an action chunk.
        num_obs_steps: steps of the observation.
        dtype: type of the layers; None: that of parameters and inputs. Norms, the condition and the last layer are
            float32.
    """

    def __init__(
        self,
        action_dim: int,
        condition_width: int,
        *,
        horizon: int,
        num_obs_steps: int,
        width: int,
        depth: int,
        num_heads: int,
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ):
        self.dtype, self.step_width = dtype, width
        self.inputs = _linear(action_dim, width, rngs=rngs)
        self.condition = _linear(condition_width, width, rngs=rngs)
        self.positions = nnx.Param(_SPREAD(rngs.params(), (horizon, width)))
        self.condition_positions = nnx.Param(_SPREAD(rngs.params(), (1 + num_obs_steps, width)))
        self.condition_in = _linear(width, 4 * width, rngs=rngs)
        self.condition_out = _linear(4 * width, width, rngs=rngs)
        self.layers = stack_layers(lambda rngs: DecoderLayer(width, num_heads, dtype=dtype, rngs=rngs), depth, rngs)
        self.last_norm = WideLayerNorm(width, rngs=rngs)
        self.outputs = _linear(width, action_dim, rngs=rngs)

    @jax.named_scope("denoising_transformer")
    def __call__(
        self,
        noisy: Float[Array, "n h a"],
        step: Float[Array, " n"],
        condition: Float[Array, "n o e"],
        added: Float[Array, "n d"] | None = None,
    ) -> Float[Array, "n h a"]:
        """`condition` has one entry per observation step; `step` is the diffusion step, to whose encoding `added` is
        added. The result is float32."""
        x = self.inputs(noisy) + self.positions[...]
        tokens = [encode_step(step, x.shape[-1], added)[:, None], self.condition(condition)]
        seen = jnp.concatenate(tokens, axis=1) + self.condition_positions[...]  # n t d
        seen = self.condition_out(jax.nn.mish(self.condition_in(seen)))
        place, other = jnp.arange(x.shape[1])[:, None], jnp.arange(seen.shape[1])
        # An action attends to earlier actions, the diffusion step, and the observations up to its own step.
        masks = (place >= jnp.arange(x.shape[1]), place >= other - 1)
        if self.dtype is not None:
            x, seen = x.astype(self.dtype), seen.astype(self.dtype)
        x, _ = scan_layers(self.layers, lambda layer, x, _: (layer(x, seen, masks), None), x, remat="none")
        return self.outputs(self.last_norm(x.astype(jnp.float32)))
