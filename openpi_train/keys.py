"""Random keys per row: a key depends only on (seed, step, row, purpose).

Therefore neither gradient accumulation nor the number of devices or processes changes what a row draws.
"""

import zlib

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key


def row_keys(seed: Array | int, step: Array | int, rows: Int[Array, " b"]) -> Key[Array, " b"]:
    """One key per row of a global batch."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.asarray(rows))


def for_purpose(keys: Key[Array, " b"], purpose: str) -> Key[Array, " b"]:
    """The rows' keys for one named use ("noise", "time", "augment/base_0_rgb"); uses never share a stream."""
    number = zlib.crc32(purpose.encode())
    return jax.vmap(lambda key: jax.random.fold_in(key, number))(keys)


def of_parts(keys: Key[Array, " b"], count: int) -> Key[Array, " parts"]:
    """The keys of `count` parts of every row, row after row."""
    parts = jnp.arange(count)
    return jax.vmap(lambda key: jax.vmap(lambda part: jax.random.fold_in(key, part))(parts))(keys).reshape(-1)


def draw_noise(keys: Key[Array, " b"], *shape: int) -> Float[Array, "b *shape"]:
    """Standard normal noise of this shape for every row."""
    return jax.vmap(lambda key: jax.random.normal(key, shape, jnp.float32))(keys)
