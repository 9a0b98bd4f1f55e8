"""Rows of completions that decode together, each at its own length: the two programs of a generator.

`admitted` reads prompts into rows, `decoded` adds tokens to all rows. Both see one device's rows; nothing is sent but
within a tensor group. Read next: `generator.py`, which compiles and calls them; `token_choice.py`.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key, UInt32

from openpi_train.generation.token_choice import choose_tokens
from openpi_train.nn.decoder import Decoder
from openpi_train.nn.decoder_sizes import DecoderSizes
from openpi_train.nn.key_value_cache import KeyValueCache
from openpi_train.nn.token_limits import RowSettings
from openpi_train.parallel.shard import as_varied
from openpi_train.types import pytree, tree_of

# What stands for no token.
NONE = -1
# Alternatives that are told with a token where asked for: as many as OpenAI's interface allows.
NUM_TOP = 20


@pytree
class Admission:
    """What rows start with. `slot` is the row to take; rows beyond the last one are not taken.

    `tokens` are the prompt's without its last one, `length` is their number; the rest is padding. `last` is the last
    token. A completion ends after a token of `stop_ids` (padded with `NONE`), or when `limit` tokens are made.
    """

    slot: Int[Array, " b"]
    tokens: Int[Array, "b t"]
    length: Int[Array, " b"]
    last: Int[Array, " b"]
    limit: Int[Array, " b"]
    stop_ids: Int[Array, "b stops"]
    seed: UInt32[Array, " b"]
    row: Int[Array, " b"]
    settings: RowSettings


@pytree
class TokenRows:
    """The rows between two calls. `last` is not in the cache yet; a row with nothing `left` to make is free."""

    cache: KeyValueCache
    last: Int[Array, " b"]
    made: Int[Array, " b"]
    left: Int[Array, " b"]
    stop_ids: Int[Array, "b stops"]
    keys: Key[Array, " b"]
    settings: RowSettings


@pytree
class NewRowTokens:
    """The tokens that rows got, padded with `NONE`, with their log-probabilities and the most probable tokens there."""

    tokens: Int[Array, "b n"]
    log_probs: Float[Array, "b n"]
    top_tokens: Int[Array, "b n k"]
    top_log_probs: Float[Array, "b n k"]
    left: Int[Array, " b"]


def free_rows(sizes: DecoderSizes, dtype: DTypeLike, num_rows: int, num_slots: int, num_stops: int) -> TokenRows:
    """Rows without completions, with a cache of `num_slots` tokens each in `dtype`."""
    shape = (num_rows, sizes.num_kv_heads, num_slots, sizes.head_dim)

    def nothing() -> tuple[Array, ...]:
        return tuple(jnp.zeros(shape, dtype) for _ in range(sizes.depth))

    zeros, ints = jnp.zeros(num_rows), jnp.zeros(num_rows, jnp.int32)
    cache = tree_of(KeyValueCache, keys=nothing(), values=nothing(), length=ints)
    settings = tree_of(RowSettings, temperature=zeros, top_k=ints, top_p=zeros + 1, min_p=zeros)
    keys = jax.vmap(jax.random.key)(ints)
    stop_ids = jnp.full((num_rows, num_stops), NONE)
    return tree_of(
        TokenRows, cache=cache, last=ints, made=ints, left=ints, stop_ids=stop_ids, keys=keys, settings=settings
    )


@jax.named_scope("admit")
def admitted(decoder: Decoder, new: Admission, rows: TokenRows) -> TokenRows:
    """The rows with these prompts in them; their keys and values are computed here."""
    _, known = decoder.prefill(new.tokens, new.length)
    t = new.tokens.shape[1]

    def put(kept: Array, found: Array) -> Array:
        return kept.at[new.slot].set(found.astype(kept.dtype), mode="drop", unique_indices=True)

    def put_tokens(kept: Array, found: Array) -> Array:
        return kept.at[new.slot, :, :t].set(found.astype(kept.dtype), mode="drop", unique_indices=True)

    cache = tree_of(
        KeyValueCache,
        keys=jax.tree.map(put_tokens, rows.cache.keys, known.keys),
        values=jax.tree.map(put_tokens, rows.cache.values, known.values),
        length=put(rows.cache.length, new.length),
    )
    keys = jax.vmap(lambda seed, row: jax.random.fold_in(jax.random.key(seed), row))(new.seed, new.row)
    return tree_of(
        TokenRows,
        cache=cache,
        last=put(rows.last, new.last),
        made=put(rows.made, jnp.zeros_like(new.last)),
        left=put(rows.left, new.limit),
        stop_ids=put(rows.stop_ids, new.stop_ids),
        keys=rows.keys.at[new.slot].set(keys, mode="drop"),
        settings=jax.tree.map(put, rows.settings, new.settings),
    )


@jax.named_scope("decode")
def decoded(
    decoder: Decoder,
    rows: TokenRows,
    *,
    num_tokens: int,
    num_slots: int,
    vocab_size: int,
    with_top: bool,
    after_limits: bool = False,
) -> tuple[NewRowTokens, TokenRows]:
    """Up to `num_tokens` more tokens for every row that has some left; stops when none has.

    Args:
        num_slots: the slots of the cache that are read; no row gets longer.
        vocab_size: tokens from here on, which the tokenizer does not have, are never chosen and have no probability.
        with_top: also return the `NUM_TOP` most probable tokens.
        after_limits: return log-probabilities with which tokens are drawn, not those before top-k, top-p and min-p.
    """
    b, num_top = len(rows.last), min(NUM_TOP, vocab_size) if with_top else 0
    # Cut out once, not for every token.
    layers, whole, cache = decoder.each_layer(), rows.cache, rows.cache.cut(num_slots)
    rows = dataclasses.replace(rows, cache=cache)
    # Values of a loop have one type before and after.
    like = rows.left
    found = tree_of(
        NewRowTokens,
        tokens=as_varied(jnp.full((b, num_tokens), NONE), like),
        log_probs=as_varied(jnp.zeros((b, num_tokens)), like),
        top_tokens=as_varied(jnp.full((b, num_tokens, num_top), NONE), like),
        top_log_probs=as_varied(jnp.zeros((b, num_tokens, num_top)), like),
        left=rows.left,
    )

    def goes_on(carry: tuple[Array, NewRowTokens, TokenRows]) -> Array:
        index, _, rows = carry
        return (index < num_tokens) & (rows.left > 0).any()

    def step(carry: tuple[Array, NewRowTokens, TokenRows]) -> tuple[Array, NewRowTokens, TokenRows]:
        index, found, rows = carry
        is_active = rows.left > 0
        x, cache = decoder.extend(rows.last[:, None], rows.cache, layers)
        logits = decoder.logits(x)[:, 0, :vocab_size]
        token, log_probs = choose_tokens(logits, rows.settings, rows.keys, rows.made, after_limits=after_limits)
        own = jnp.take_along_axis(log_probs, token[:, None], axis=1)[:, 0]
        top_log_probs, top_tokens = jax.lax.top_k(log_probs, num_top)

        def put(kept: Array, new: Array, absent: float) -> Array:
            shown = jnp.where(is_active.reshape(-1, *(1,) * (new.ndim - 1)), new, absent)
            return jax.lax.dynamic_update_index_in_dim(kept, shown.astype(kept.dtype), index, 1)

        ends = (token[:, None] == rows.stop_ids).any(axis=1)
        left = jnp.where(is_active & ~ends, rows.left - 1, 0)
        found = tree_of(
            NewRowTokens,
            tokens=put(found.tokens, token, NONE),
            log_probs=put(found.log_probs, own, 0),
            top_tokens=put(found.top_tokens, top_tokens, NONE),
            top_log_probs=put(found.top_log_probs, top_log_probs, 0),
            left=left,
        )
        length = jnp.where(is_active, cache.length, rows.cache.length)
        rows = tree_of(
            TokenRows,
            cache=tree_of(KeyValueCache, keys=cache.keys, values=cache.values, length=length),
            last=jnp.where(is_active, token, rows.last),
            made=rows.made + is_active,
            left=left,
            stop_ids=rows.stop_ids,
            keys=rows.keys,
            settings=rows.settings,
        )
        return index + 1, found, rows

    _, found, rows = jax.lax.while_loop(goes_on, step, (as_varied(jnp.int32(0), like), found, rows))
    return found, dataclasses.replace(rows, cache=whole.with_first(rows.cache))


@jax.named_scope("free")
def freed(slots: Int[Array, " b"], rows: TokenRows) -> TokenRows:
    """The rows without the completions in `slots`; slots beyond the last row are ignored."""
    left = rows.left.at[slots].set(0, mode="drop")
    return tree_of(TokenRows, **{**{name: getattr(rows, name) for name in rows.__dataclass_fields__}, "left": left})
