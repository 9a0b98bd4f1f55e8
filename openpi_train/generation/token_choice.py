"""The choice of the next token of every row, each with its own temperature, limits and random key.

Read next: `token_rows.py`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from openpi_train.nn.shard import as_varied
from openpi_train.types import pytree

_BITS = 31  # of a positive float32


@pytree
class RowSettings:
    """The part of `SamplingSettings` that the choice of a token depends on, for every row."""

    temperature: Float[Array, " b"]
    top_k: Int[Array, " b"]
    top_p: Float[Array, " b"]
    min_p: Float[Array, " b"]


@jax.named_scope("choose_token")
def choose_tokens(
    logits: Float[Array, "b v"], settings: RowSettings, keys: Key[Array, " b"], places: Int[Array, " b"] | None = None
) -> tuple[Int[Array, " b"], Float[Array, "b v"]]:
    """A token for every row, and the log-probabilities of all tokens at its temperature, before the limits.

    A temperature of 0 takes the most probable token, and its log-probabilities are those at temperature 1.

    Args: `places` are folded into the keys, if given. Without random choices no key is computed.
    """
    is_greedy = settings.temperature == 0
    log_probs = jax.nn.log_softmax(logits / jnp.where(is_greedy, 1.0, settings.temperature)[:, None])
    likeliest = jnp.argmax(logits, axis=-1)

    def draw() -> Array:
        masses = limited(jnp.exp(log_probs), settings)
        # By the inverse of the distribution function: one random number per row. A token without mass is never taken,
        # because the sum does not rise there.
        sums = jnp.cumsum(masses, axis=-1)
        own = keys if places is None else jax.vmap(jax.random.fold_in)(keys, places)
        at = jax.vmap(lambda key: jax.random.uniform(key, ()))(own) * sums[:, -1]
        found = (sums <= at[:, None]).sum(axis=-1)
        return jnp.where(is_greedy | (found == masses.shape[1]), likeliest, found)

    token = jax.lax.cond(is_greedy.all(), lambda: likeliest, draw)
    return token.astype(jnp.int32), log_probs


def limited(probs: Float[Array, "b v"], settings: RowSettings) -> Float[Array, "b v"]:
    """Probabilities with zeros for the tokens that top-k, top-p and min-p exclude; they do not sum to 1 any more.

    Tokens as probable as the last one that is kept are kept too.
    """

    def by_rank() -> Array:
        of_k = _largest_threshold(probs, lambda kept: kept.sum(axis=-1) >= settings.top_k)
        kept = jnp.where((settings.top_k > 0)[:, None] & (probs < of_k[:, None]), 0.0, probs)
        wanted = settings.top_p * kept.sum(axis=-1)
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
