"""Norms over the last axis, and the sum of a residual branch. Read next: `gemma.py`, `siglip.py`.

torch's own norms are in `wide_norms.py`.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float


class LayerNorm(nnx.Module):
    """Layer norm, computed in float32 and returned in the type of its input.

    flax's own (`nnx.LayerNorm` at 0.12.8) first rounds its parameters to bfloat16, unlike openpi's tower.
    """

    def __init__(self, width: int):
        self.scale = nnx.Param(jnp.ones(width))
        self.bias = nnx.Param(jnp.zeros(width))

    def __call__(self, x: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
        wide = x.astype(jnp.float32)
        mean = jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.maximum(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) - jnp.square(mean), 0.0)
        factor = jax.lax.rsqrt(variance + 1e-6) * self.scale[...]
        return ((wide - mean) * factor + self.bias[...]).astype(x.dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square norm, computed in float32; with `condition_width` its scale, shift and gate are predicted.

    The predicted form is the adaptive norm that conditions pi0.5 on the flow time (as in DiT, Peebles & Xie 2023,
    section 3.2, "adaLN-zero"): it starts as the plain norm with a closed gate.
    Plain norms multiply by `offset` plus the trained scale: Gemma's by 1 + scale, Llama's by the scale itself.
    """

    def __init__(
        self,
        width: int,
        condition_width: int | None = None,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
        offset: float = 1.0,
        eps: float = 1e-6,
    ):
        self.adaptive = condition_width is not None
        self.offset, self.eps = offset, eps
        if condition_width is None:
            self.scale = nnx.Param(jnp.full(width, 1.0 - offset, jnp.float32))
        else:
            zeros = nnx.initializers.zeros_init()
            self.modulation = nnx.Linear(condition_width, 3 * width, kernel_init=zeros, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "b t *n d"], condition: Float[Array, "b r c"] | None = None
    ) -> tuple[Float[Array, "b t *n d"], Float[Array, "b t d"] | None]:
        """The normed tokens (or heads of tokens), and the gate for the residual branch (None in the plain form).

        The tokens are r groups of equal size, one after the other; each has its own condition.
        """
        rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)  # in the shape in which `residual` adds them
        mean_square = jnp.mean(jnp.square(rows), axis=-1, keepdims=True)
        normed = rows * jax.lax.rsqrt(mean_square + self.eps)
        if not self.adaptive:
            normed = normed * (self.offset + self.scale[...].astype(jnp.float32))
            return normed.astype(x.dtype).reshape(x.shape), None
        if condition is None:
            raise ValueError("this norm is adaptive and needs a condition; give one for each of its experts")
        modulation = self.modulation(condition)
        modulation = jnp.repeat(modulation, x.shape[1] // condition.shape[1], axis=1)  # b t 3d
        scale, shift, gate = jnp.split(modulation, 3, axis=-1)
        scale, shift = scale.astype(jnp.float32), shift.astype(jnp.float32)
        return (normed.reshape(x.shape) * (1 + scale) + shift).astype(x.dtype), gate


def residual(x: Float[Array, "b t d"], update: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
    """`x + update`, added as a matrix.

    XLA for GPUs adds within the product that ends the update. Of arrays that its product does not have in this shape it
    would first make a copy, to overwrite that (jaxlib 0.10.2).
    """
    return (x.reshape(-1, x.shape[-1]) + update.reshape(-1, x.shape[-1])).reshape(x.shape)
