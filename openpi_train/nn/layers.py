"""Blocks that several networks share: layer stacks that are scanned, RMS norms, the encoding of flow time.

Read next: `attention.py`, then `siglip.py` and `gemma.py`, which are made of these.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

# What the backward pass may keep of a layer: everything, the matrix products with weights, or the layer's input only.
Remat = Literal["none", "dots", "full"]

_POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}

M = TypeVar("M", bound=nnx.Module)


def stack_layers(make: Callable[[nnx.Rngs], M], depth: int, rngs: nnx.Rngs) -> M:
    """One module whose parameters are those of `depth` separately initialised layers, stacked on a new first axis."""
    return nnx.vmap(make)(rngs.split(depth))


def scan_layers(
    stacked: M, body: Callable[[M, Any, Any], tuple[Any, Any]], carry: Any, per_layer: Any = None, *, remat: Remat
) -> tuple[Any, Any]:
    """Apply a stack of layers in order.

    Args:
        stacked: what `stack_layers` made.
        body: (layer, carry, this layer's slice of `per_layer`) -> (carry, output).
        carry: what flows from layer to layer.
        per_layer: a tree of arrays with the layers on the first axis, or None.
        remat: what the backward pass recomputes.

    Returns:
        The last carry, and the layers' outputs stacked on a first axis.
    """
    graph, params = nnx.split(stacked)

    def step(carry, layer):
        layer_params, extra = layer
        return body(nnx.merge(graph, layer_params), carry, extra)

    if remat != "none":
        # Inside a scan nothing can be merged across the barrier anyway, so it need not be there (prevent_cse).
        step = jax.checkpoint(step, prevent_cse=False, policy=_POLICIES[remat])
    return jax.lax.scan(step, carry, (params, per_layer))


class LayerNorm(nnx.Module):
    """Layer norm, computed in float32 and returned in the type of its input.

    flax's own (`nnx.LayerNorm` at 0.12.8) rounds its parameters to bfloat16 first, which openpi's tower does not do.
    """

    def __init__(self, width: int):
        self.scale = nnx.Param(jnp.ones(width))
        self.bias = nnx.Param(jnp.zeros(width))

    def __call__(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        wide = x.astype(jnp.float32)
        mean = jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.maximum(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) - jnp.square(mean), 0.0)
        factor = jax.lax.rsqrt(variance + 1e-6) * self.scale[...]
        return ((wide - mean) * factor + self.bias[...]).astype(x.dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square norm, computed in float32; with `condition_width` its scale, shift and gate are predicted.

    The predicted form is the adaptive norm by which pi0.5 sees the flow time (as in DiT, Peebles & Xie 2023,
    section 3.2, "adaLN-zero"): it starts as the plain norm with a closed gate.
    """

    def __init__(self, width: int, condition_width: int | None = None, *, dtype: Any, rngs: nnx.Rngs):
        self.adaptive = condition_width is not None
        if condition_width is None:
            self.scale = nnx.Param(jnp.zeros(width))
        else:
            zeros = nnx.initializers.zeros_init()
            self.modulation = nnx.Linear(condition_width, 3 * width, kernel_init=zeros, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "b t d"], condition: Float[Array, "b r c"] | None
    ) -> tuple[Float[Array, "b t d"], Float[Array, "b t d"] | None]:
        """The normed tokens, and the gate for the residual branch (None in the plain form).

        The tokens are r groups of equal size, one after the other; each has its own condition.
        """
        mean_square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
        normed = x.astype(jnp.float32) * jax.lax.rsqrt(mean_square + 1e-6)
        if not self.adaptive:
            return (normed * (1 + self.scale[...].astype(jnp.float32))).astype(x.dtype), None
        if condition is None:
            raise ValueError("this norm is adaptive and needs a condition; give one for each of its experts")
        modulation = self.modulation(condition)
        modulation = jnp.repeat(modulation, x.shape[1] // condition.shape[1], axis=1)  # b t 3d
        scale, shift, gate = jnp.split(modulation, 3, axis=-1)
        scale, shift = scale.astype(jnp.float32), shift.astype(jnp.float32)
        return (normed * (1 + scale) + shift).astype(x.dtype), gate


def sincos_encoding(
    position: Float[Array, "*n"], width: int, min_period: float, max_period: float
) -> Float[Array, "*n width"]:
    """Sines, then cosines, of `position` at `width / 2` periods spaced evenly in logarithm, in float32.

    Angles reach hundreds of turns, where float32 rounding shows: the order of operations is openpi's, on purpose.
    """
    fraction = jnp.linspace(0.0, 1.0, width // 2)
    period = min_period * (max_period / min_period) ** fraction
    angle = position.astype(jnp.float32)[..., None] * (1.0 / period * 2 * jnp.pi)
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
