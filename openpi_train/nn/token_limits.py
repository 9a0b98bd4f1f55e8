"""Which tokens may be chosen: top-k, top-p and min-p, for every row its own.

The sampler and the score of what was sampled use the same function: `generation/token_choice.py`,
`sampling/token_distribution.py`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from openpi_train.parallel.shard import as_varied
from openpi_train.types import pytree

_BITS = 31  # of a positive float32
# A smaller top-p keeps the same tokens. Its product with a sum of probabilities must not become 0, which keeps all.
_LEAST_TOP_P = 1e-30


@pytree
class RowSettings:
    """The part of `SamplingSettings` that the choice of a token depends on, for every row."""

    temperature: Float[Array, " b"]
    top_k: Int[Array, " b"]
    top_p: Float[Array, " b"]
    min_p: Float[Array, " b"]


def limited(probs: Float[Array, "b v"], settings: RowSettings) -> Float[Array, "b v"]:
    """Probabilities with zeros for the tokens that top-k, top-p and min-p exclude; they do not sum to 1 any more.

    Tokens as probable as the last one that is kept are kept too.
    """

    def by_rank() -> Array:
        of_k = _largest_threshold(probs, lambda kept: kept.sum(axis=-1) >= settings.top_k)
        kept = jnp.where((settings.top_k > 0)[:, None] & (probs < of_k[:, None]), 0.0, probs)
        wanted = jnp.maximum(settings.top_p, _LEAST_TOP_P) * kept.sum(axis=-1)
        of_p = _largest_threshold(kept, lambda above: jnp.where(above, kept, 0.0).sum(axis=-1) >= wanted)
        return jnp.where((settings.top_p < 1)[:, None] & (kept < of_p[:, None]), 0.0, kept)

    kept = jax.lax.cond(((settings.top_k > 0) | (settings.top_p < 1)).any(), by_rank, lambda: probs)
    return jnp.where(probs < (settings.min_p * probs.max(axis=-1))[:, None], 0.0, kept)


def _largest_threshold(
    probs: Float[Array, "b v"], is_enough: Callable[[Bool[Array, "b v"]], Bool[Array, " b"]]
) -> Float[Array, " b"]:
    """For every row the largest float32 with `is_enough(probs >= it)`, found bit by bit; 0 is always enough.

    Positive floats are ordered as their bits are. No sorting: it takes many times as long for large vocabularies.
    """

    def with_bit(index: Int[Array, ""], bits: Int[Array, " b"]) -> Int[Array, " b"]:
        tried = bits | (jnp.int32(1) << (_BITS - 1 - index))
        return jnp.where(is_enough(probs >= _as_float(tried)[:, None]), tried, bits)

    none = as_varied(jnp.zeros(len(probs), jnp.int32), probs)
    return _as_float(jax.lax.fori_loop(0, _BITS, with_bit, none))


def _as_float(bits: Int[Array, " b"]) -> Float[Array, " b"]:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
