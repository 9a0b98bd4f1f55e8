"""Logits by a token table, and log-probabilities of given tokens without all logits at once.

A table whose rows are sharded over devices is never gathered: each device computes logits of all devices' tokens for
its own rows (vocabulary parallelism, Shoeybi et al. 2019, section 3); only activations and a few numbers per token are
sent. Read next: `shard.py`, `gemma.py`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from openpi_train.nn.shard import Shard

# Tokens of a row processed at once: 33 MB of float32 logits per row, with PaliGemma's 257 152 tokens.
CHUNK_TOKENS = 32


@jax.named_scope("logits")
def logits(x: Float[Array, "b t d"], table: Array | Shard) -> Float[Array, "b t v"]:
    """The products of activations with all rows of the table, in the dtype of `x`, summed in float32."""
    if not isinstance(table, Shard):
        return _products(x, table)
    if not table.has_rows:
        return _products(x, table.whole())
    scores = _products(jax.lax.all_gather(x, table.axis), table.part)  # devices b t v/devices
    return jax.lax.all_to_all(scores, table.axis, split_axis=0, concat_axis=3, tiled=True)[0]


@jax.named_scope("log_probs")
def log_probs(
    x: Float[Array, "b t d"], table: Array | Shard, tokens: Int[Array, "b t"]
) -> tuple[Float[Array, "b t"], Bool[Array, "b t"]]:
    """The log-softmax of `logits(x, table)` at `tokens`, float32, and whether no other token has a higher logit.

    Logits are computed for a few tokens at a time, and recomputed in the backward pass.
    """
    if isinstance(table, Shard) and not table.has_rows:
        table = table.whole()
    t = tokens.shape[1]
    if t <= CHUNK_TOKENS:
        return _log_probs(x, table, tokens)
    missing = -t % CHUNK_TOKENS

    def chunks(array: Array) -> Array:
        padded = jnp.pad(array, ((0, 0), (0, missing)) + ((0, 0),) * (array.ndim - 2))
        return padded.reshape(padded.shape[0], -1, CHUNK_TOKENS, *padded.shape[2:]).swapaxes(0, 1)

    def joined(array: Array) -> Array:
        return array.swapaxes(0, 1).reshape(array.shape[1], -1)[:, :t]

    @jax.checkpoint
    def score(_, chunk):
        return None, _log_probs(chunk[0], table, chunk[1])

    found, is_best = jax.lax.scan(score, None, (chunks(x), chunks(tokens)))[1]
    return joined(found), joined(is_best)


def _log_probs(x: Array, table: Array | Shard, tokens: Array) -> tuple[Array, Array]:
    if isinstance(table, Shard):
        return _log_probs_by_rows(x, table, tokens)
    scores = _products(x, table)
    own = jnp.take_along_axis(scores, tokens[..., None], axis=-1)[..., 0]
    return own - jax.nn.logsumexp(scores, axis=-1), own >= scores.max(axis=-1)


def _log_probs_by_rows(x: Array, table: Shard, tokens: Array) -> tuple[Array, Array]:
    """`_log_probs` where each device computes the logits of its rows for all devices' tokens; sums are returned."""
    scores = _products(jax.lax.all_gather(x, table.axis), table.part)  # devices b t v/devices
    index = jax.lax.axis_index(table.axis)
    place = jax.lax.all_gather(tokens, table.axis) - index * table.part.shape[0]
    is_here = (place >= 0) & (place < table.part.shape[0])
    own = jnp.take_along_axis(scores, jnp.where(is_here, place, 0)[..., None], axis=-1)[..., 0]
    highest = jax.lax.pmax(jax.lax.stop_gradient(scores).max(axis=-1), table.axis)  # devices b t
    mass = jnp.exp(scores - highest[..., None]).sum(axis=-1)
    own, mass = (jax.lax.psum_scatter(part, table.axis) for part in (jnp.where(is_here, own, 0.0), mass))
    highest = highest[index]
    return own - highest - jnp.log(mass), own >= highest


def _products(x: Array, table: Array) -> Array:
    return jnp.einsum("...d,vd->...v", x, table.astype(x.dtype), preferred_element_type=jnp.float32)
