"""Dropout with a key per row, so that devices and micro-batches draw the same.

Read next: `models/act/act_network.py`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

# One key per row; None: nothing is dropped, as in evaluation.
RowKeys = Key[Array, " b"] | None


@jax.named_scope("dropout")
def dropped(x: Float[Array, "b *n"], keys: RowKeys, rate: float) -> Float[Array, "b *n"]:
    """`x` with each value set to 0 with probability `rate`, the others divided by 1 - rate."""
    if keys is None or rate == 0:
        return x
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1.0 - rate, x.shape[1:]))(keys)
    return jnp.where(kept, x / (1.0 - rate), jnp.zeros((), x.dtype))


def numbered(keys: RowKeys, number: int | Array) -> RowKeys:
    """The rows' keys of this number: those of a layer, or of one of its uses."""
    return None if keys is None else jax.vmap(lambda key: jax.random.fold_in(key, number))(keys)
