"""torch's norms and Mish: computed in float32 and returned in the type of their input.

Read next: `resnet.py`, `unet1d.py`.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

# torch's, for all norms.
EPSILON = 1e-5


class WideGroupNorm(nnx.GroupNorm):
    """torch's group norm over the last axis."""

    def __init__(self, channels: int, num_groups: int, *, rngs: nnx.Rngs):
        super().__init__(channels, num_groups=num_groups, epsilon=EPSILON, use_fast_variance=False, rngs=rngs)

    def __call__(self, x: Float[Array, "b *n c"]) -> Float[Array, "b *n c"]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().__call__(x.astype(jnp.float32)).astype(x.dtype)


class WideLayerNorm(nnx.LayerNorm):
    """torch's layer norm over the last axis."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        super().__init__(width, epsilon=EPSILON, use_fast_variance=False, rngs=rngs)

    def __call__(self, x: Float[Array, "b *n d"]) -> Float[Array, "b *n d"]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().__call__(x.astype(jnp.float32)).astype(x.dtype)


def wide_mish(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """`x tanh(log(1 + exp(x)))`."""
    return jax.nn.mish(x.astype(jnp.float32)).astype(x.dtype)
