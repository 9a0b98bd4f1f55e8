"""Logits by a token table, and log-probabilities of given tokens without all logits at once.

A table whose rows are sharded over devices is never gathered: each device computes logits of all devices' tokens for
its own rows (vocabulary parallelism, Shoeybi et al. 2019, section 3); only activations and a few numbers per token are
sent. Read next: `shard.py`, `decoder.py`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Bool, Float, Int

from openpi_train.nn.attention import soft_cap
from openpi_train.nn.shard import Shard
from openpi_train.types import pytree, tree_of

# Tokens of a row processed at once: 33 MB of float32 logits per row, with PaliGemma's 257 152 tokens.
CHUNK_TOKENS = 32


@pytree
class TokenScores:
    """Log-probabilities of given tokens, float32, and what comes with them.

    `is_best` says whether no other token has a higher logit, `normalizer` is the log-sum-exp of the logits (for a
    z-loss), `entropy` that of the distribution, `mean_log_prob` the mean log-probability over the whole vocabulary; the
    last two are None if not requested.
    """

    log_prob: Float[Array, "b t"]
    is_best: Bool[Array, "b t"]
    normalizer: Float[Array, "b t"]
    entropy: Float[Array, "b t"] | None = None
    mean_log_prob: Float[Array, "b t"] | None = None


@dataclasses.dataclass(frozen=True)
class Head:
    """How products with the table become logits: soft cap (None: without), then division by `temperature`."""

    cap: float | None = None
    temperature: float = 1.0

    def __call__(self, products: Float[Array, "*n"]) -> Float[Array, "*n"]:
        capped = soft_cap(products, self.cap)
        return capped if self.temperature == 1.0 else capped / self.temperature


@jax.named_scope("logits")
def logits(x: Float[Array, "b t d"], table: Array | Shard, head: Head = Head()) -> Float[Array, "b t v"]:
    """The products of activations with all rows of the table in the dtype of `x`, summed in float32, through `head`."""
    if not isinstance(table, Shard):
        return head(_products(x, table))
    if not table.has_rows:
        return head(_products(x, table.whole()))
    scores = head(_products(jax.lax.all_gather(x, table.axis), table.part))  # devices b t v/devices
    return jax.lax.all_to_all(scores, table.axis, split_axis=0, concat_axis=3, tiled=True)[0]


def log_probs(
    x: Float[Array, "b t d"], table: Array | Shard, tokens: Int[Array, "b t"]
) -> tuple[Float[Array, "b t"], Bool[Array, "b t"]]:
    """The log-softmax of `logits(x, table)` at `tokens`, float32, and whether no other token has a higher logit."""
    found = token_scores(x, table, tokens)
    return found.log_prob, found.is_best


@jax.named_scope("log_probs")
def token_scores(
    x: Float[Array, "b t d"],
    table: Array | Shard,
    tokens: Int[Array, "b t"],
    head: Head = Head(),
    *,
    with_entropy: bool = False,
    with_mean: bool = False,
) -> TokenScores:
    """Log-probabilities of `tokens` by `logits(x, table, head)`, and what comes with them.

    Logits are computed for a few tokens at a time, and recomputed in the backward pass.
    """
    if isinstance(table, Shard) and not table.has_rows:
        table = table.whole()
    rows, by_rows = (table.part, _scores_by_rows) if isinstance(table, Shard) else (table, _scores)
    narrow = jax.lax.stop_gradient(rows).astype(x.dtype)  # once, and not in every chunk
    return in_chunks(functools.partial(by_rows, table, narrow, head, with_entropy, with_mean), x, tokens)


def in_chunks(score: Callable[[Any, Any], Any], x: Float[Array, "b t d"], tokens: Int[Array, "b t"]) -> Any:
    """The tree of arrays "b t" that `score(x, tokens)` gives, computed and differentiated a few tokens at a time."""
    t = tokens.shape[1]
    if t <= CHUNK_TOKENS:
        return score(x, tokens)
    missing = -t % CHUNK_TOKENS

    def chunks(array: Array) -> Array:
        padded = jnp.pad(array, ((0, 0), (0, missing)) + ((0, 0),) * (array.ndim - 2))
        return padded.reshape(padded.shape[0], -1, CHUNK_TOKENS, *padded.shape[2:]).swapaxes(0, 1)

    def joined(array: Array) -> Array:
        return array.swapaxes(0, 1).reshape(array.shape[1], -1)[:, :t]

    @jax.checkpoint
    def chunk(_, part):
        return None, score(*part)

    return jax.tree.map(joined, jax.lax.scan(chunk, None, (chunks(x), chunks(tokens)))[1])


def _scores(
    table: Array, narrow: Array, head: Head, with_entropy: bool, with_mean: bool, x: Array, tokens: Array
) -> TokenScores:
    scores = head(_learned_products(x, narrow, table))
    own = _at(scores, tokens)
    normalizer = jax.nn.logsumexp(scores, axis=-1)
    entropy = None
    if with_entropy:
        log_probs = scores - normalizer[..., None]
        entropy = -(jnp.exp(log_probs) * log_probs).sum(axis=-1)
    return tree_of(
        TokenScores,
        log_prob=own - normalizer,
        is_best=own >= scores.max(axis=-1),
        normalizer=normalizer,
        entropy=entropy,
        mean_log_prob=scores.mean(axis=-1) - normalizer if with_mean else None,
    )


def _scores_by_rows(
    table: Shard, narrow: Array, head: Head, with_entropy: bool, with_mean: bool, x: Array, tokens: Array
) -> TokenScores:
    """`_scores` where each device computes the logits of its rows for all devices' tokens; sums are returned."""
    x = jax.lax.all_gather(x, table.axis)
    scores = head(_learned_products(x, narrow, table.part))  # devices b t v/devices
    index = jax.lax.axis_index(table.axis)
    place = jax.lax.all_gather(tokens, table.axis) - index * table.part.shape[0]
    is_here = (place >= 0) & (place < table.part.shape[0])
    own = _at(scores, jnp.where(is_here, place, 0))
    highest = jax.lax.pmax(jax.lax.stop_gradient(scores).max(axis=-1), table.axis)  # devices b t
    above = scores - highest[..., None]
    masses = jnp.exp(above)
    own, mass = (jax.lax.psum_scatter(part, table.axis) for part in (jnp.where(is_here, own, 0.0), masses.sum(axis=-1)))
    log_mass, highest, entropy, mean = jnp.log(mass), highest[index], None, None
    if with_entropy:
        entropy = log_mass - jax.lax.psum_scatter((masses * above).sum(axis=-1), table.axis) / mass
    if with_mean:
        total = jax.lax.psum_scatter(above.sum(axis=-1), table.axis)
        mean = total / (scores.shape[-1] * jax.lax.axis_size(table.axis)) - log_mass
    return tree_of(
        TokenScores,
        log_prob=own - highest - log_mass,
        is_best=own >= highest,
        normalizer=highest + log_mass,
        entropy=entropy,
        mean_log_prob=mean,
    )


def _at(scores: Float[Array, "*n v"], tokens: Int[Array, "*n"]) -> Float[Array, "*n"]:
    """The scores of these tokens. Their gradient is made where it is read, and not written into zeros of its own."""
    return _taken(scores.shape[-1], scores, tokens)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _taken(size: int, scores: Array, tokens: Array) -> Array:
    del size
    return jnp.take_along_axis(scores, tokens[..., None], axis=-1)[..., 0]


def _taken_forward(size: int, scores: Array, tokens: Array) -> tuple[Array, Array]:
    return _taken(size, scores, tokens), tokens


def _taken_backward(size: int, tokens: Array, gradient: Array) -> tuple[Array, None]:
    places = jax.lax.broadcasted_iota(tokens.dtype, (*tokens.shape, size), tokens.ndim)
    return jnp.where(places == tokens[..., None], gradient[..., None], 0.0), None


_taken.defvjp(_taken_forward, _taken_backward)


def _products(x: Array, table: Array) -> Array:
    return jnp.einsum("...d,vd->...v", x, table.astype(x.dtype), preferred_element_type=jnp.float32)


@jax.custom_vjp
def _learned_products(x: Array, narrow: Array, table: Array) -> Array:
    """`_products` by `narrow`, which is `table` in the dtype of `x`; what is learned goes to `table`.

    As everywhere else in the model, the gradient enters products in the dtype of `x`, and is summed in float32.
    """
    del table
    return _products(x, narrow)


def _learned_forward(x: Any, narrow: Any, table: Any) -> tuple[Array, Any]:
    return _products(x.value, narrow.value), (x.value, narrow.value, table.value if table.perturbed else None)


def _learned_backward(kept: Any, gradient: Any) -> tuple[Array, None, Array | None]:
    x, narrow, table = kept
    if isinstance(gradient, SymbolicZero):
        return jnp.zeros_like(x), None, None
    gradient = gradient.astype(x.dtype)
    of_table = None
    if table is not None:
        outer = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
        of_table = jnp.einsum("nv,nd->vd", *outer, preferred_element_type=jnp.float32).astype(table.dtype)
    return jnp.einsum("...v,vd->...d", gradient, narrow), None, of_table


_learned_products.defvjp(_learned_forward, _learned_backward, symbolic_zeros=True)
