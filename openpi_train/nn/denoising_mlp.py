"""The smallest network of a diffusion policy: a residual MLP over the whole chunk, for policies from states.

For short action chunks without images, it replaces on two CPU cores a UNet on a GPU.
Read next: `unet1d.py`, the network it replaces; `models/diffusion_policy/diffusion_policy_network.py`.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from openpi_train.nn.resnet import TORCH_INIT
from openpi_train.nn.unet1d import encode_step
from openpi_train.nn.wide_norms import WideLayerNorm, wide_mish

_linear = functools.partial(nnx.Linear, kernel_init=TORCH_INIT)


class ResidualLayer(nnx.Module):
    """A norm, Mish and a linear layer with a skip connection."""

    def __init__(self, width: int, *, dtype: DTypeLike | None = None, rngs: nnx.Rngs):
        self.norm = WideLayerNorm(width, rngs=rngs)
        self.linear = _linear(width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "n d"]) -> Float[Array, "n d"]:
        return x + self.linear(wide_mish(self.norm(x)))


class DenoisingMlp(nnx.Module):
    """Maps noisy action chunks, diffusion steps and a condition to the objective's target, of the chunks' shape.

    Args:
        action_dim: dims of an action.
        condition_width: width of the condition.
        step_width: width of the diffusion step's encoding, which is appended to the condition.
        dtype: type of the layers; None: that of parameters and inputs. Norms and the last layer are float32.
    """

    def __init__(
        self, action_dim: int, condition_width: int, *, horizon: int, width: int, depth: int, step_width: int,
        dtype: DTypeLike | None = None, rngs: nnx.Rngs,
    ):  # fmt: skip
        self.step_width = step_width
        self.inputs = _linear(horizon * action_dim + step_width + condition_width, width, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([ResidualLayer(width, dtype=dtype, rngs=rngs) for _ in range(depth)])
        self.outputs = _linear(width, horizon * action_dim, rngs=rngs)

    @jax.named_scope("denoising_mlp")
    def __call__(
        self,
        noisy: Float[Array, "n h a"],
        step: Float[Array, " n"],
        condition: Float[Array, "n ..."],
        added: Float[Array, "n d"] | None = None,
    ) -> Float[Array, "n h a"]:
        """`condition` is flattened; `step` is the diffusion step, to whose encoding `added` is added. The result is
        float32."""
        parts = [noisy, encode_step(step, self.step_width, added), condition]
        x = self.inputs(jnp.concatenate([part.reshape(len(part), -1) for part in parts], axis=-1))
        for layer in self.layers:
            x = layer(x)
        return self.outputs(jax.nn.mish(x.astype(jnp.float32))).reshape(noisy.shape)
