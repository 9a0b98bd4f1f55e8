"""Decode FAST tokens to action chunks on the devices, without a transfer to the host.

Computes the same as `data/tokenizers/fast_tokenizer.py: FastTokenizer.decode`, in array operations.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from openpi_train.data.robot.action_prompt import vocabulary_token
from openpi_train.data.tokenizers.fast_tokenizer import FastTokenizer, from_frequencies, load_fast

# The maximum bytes of a UTF-8 character below 65 536; no coefficient is above.
_MOST_BYTES = 3


@dataclasses.dataclass(frozen=True)
class ActionTokens:
    """Decodes tokens of a model's vocabulary to normalised chunks. The FAST processor is read at first use."""

    fast_tokenizer: str
    vocab_size: int
    action_horizon: int
    action_dim: int

    def __call__(self, tokens: Int[Array, "b n"]) -> Float[Array, "b h a"]:
        """The chunks encoded by the first run of FAST tokens in each row; zeros if it does not encode a whole chunk."""
        fast = load_fast(self.fast_tokenizer)
        own = vocabulary_token(tokens, self.vocab_size)
        is_action = (own >= 0) & (own < fast.vocab_size)
        starts = is_action & ~jnp.pad(is_action[:, :-1], ((0, 0), (1, 0)))
        is_action &= jnp.cumsum(starts, axis=1) == 1
        return decode_chunks(fast, jnp.where(is_action, own, -1), self.action_horizon, self.action_dim)


@jax.named_scope("read_actions")
def decode_chunks(fast: FastTokenizer, tokens: Int[Array, "b n"], horizon: int, dims: int) -> Float[Array, "b h a"]:
    """The chunks encoded by FAST tokens, float32; -1 is ignored. Zeros if the tokens do not encode such a chunk."""
    table, lengths = _table(fast)
    one = functools.partial(_decode_one, jnp.asarray(table), jnp.asarray(lengths), horizon * dims)
    characters, is_chunk = jax.vmap(one)(tokens)
    coefficients = (characters + fast.min_token).reshape(-1, horizon, dims) / jnp.float32(fast.scale)
    basis = from_frequencies(np.eye(horizon)).astype(np.float32)
    chunks = jnp.einsum("hk,bka->bha", basis, coefficients, precision=jax.lax.Precision.HIGHEST)
    return jnp.where(is_chunk[:, None, None], chunks, 0.0)


def _table(fast: FastTokenizer) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of each token, int32 [v + 1, longest], and their number; the last row, for -1, has none."""
    pieces = [*fast.pieces, b""]
    table = np.zeros((len(pieces), max(map(len, pieces))), np.int32)
    for token, piece in enumerate(pieces):
        table[token, : len(piece)] = list(piece)
    return table, np.array([len(piece) for piece in pieces], np.int32)


def _decode_one(table: Array, lengths: Array, count: int, tokens: Int[Array, " n"]) -> tuple[Array, Array]:
    """`count` characters, and whether the tokens' bytes are exactly `count` UTF-8 characters."""
    ends = jnp.cumsum(lengths[tokens])
    place = jnp.arange(count * _MOST_BYTES)
    token = jnp.minimum(jnp.searchsorted(ends, place, side="right"), len(tokens) - 1)
    offset = place - (ends - lengths[tokens])[token]
    there = place < ends[-1]
    octets = jnp.where(there, table[tokens[token], jnp.minimum(offset, table.shape[1] - 1)], 0)
    # Length of the character that a byte begins; 0 for continuation bytes and invalid first bytes.
    size = jnp.select(
        [octets < 0x80, octets < 0xC2, octets < 0xE0, octets < 0xF0], [jnp.int32(1), 0, 2, 3], jnp.int32(0)
    )
    size = jnp.where(there, size, 0)
    second, third = (jnp.pad(octets[ahead:], (0, ahead)) for ahead in (1, 2))
    value = jnp.select(
        [size == 1, size == 2],
        [octets, (octets & 0x1F) << 6 | second & 0x3F],
        (octets & 0x0F) << 12 | (second & 0x3F) << 6 | third & 0x3F,
    )
    follows = there & (octets & 0xC0 == 0x80)
    begun = jnp.cumsum(size > 0)
    start = jnp.minimum(jnp.searchsorted(begun, jnp.arange(1, count + 1)), len(place) - 1)
    # The first byte begins a character, every other follows or begins one, each character ends where the next begins.
    is_text = (size[0] > 0) & jnp.all(~there | (size > 0) | follows) & (size.sum() == ends[-1])
    is_text &= jnp.all(jnp.diff(start) == size[start[:-1]])
    # Forbidden in UTF-8: overlong three-byte forms and surrogates; and here the replacement character.
    wide = (value >= 0x800) & ((value < 0xD800) | (value > 0xDFFF)) & (value != 0xFFFD)
    is_text &= jnp.all((size != 3) | wide)
    return value[start], is_text & (begun[-1] == count) & (ends[-1] <= len(place))
