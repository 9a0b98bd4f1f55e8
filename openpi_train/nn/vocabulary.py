"""Logits by a token table, and log-probabilities of given tokens, a few at a time where logits need not be kept.

A table whose rows are sharded over devices is never gathered: each device computes logits of all devices' tokens for
its own rows (vocabulary parallelism, Shoeybi et al. 2019, section 3); only activations and a few numbers per token are
sent. Read next: `parallel/shard.py`, `decoder.py`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Bool, Float, Int

from openpi_train.nn.attention import soft_cap
from openpi_train.parallel.params import use_of
from openpi_train.parallel.remat import Remat
from openpi_train.parallel.shard import Shard
from openpi_train.types import pytree, tree_of

# Tokens of a row processed at once where logits are not kept: 33 MB of float32 logits per row, with PaliGemma's
# 257 152 tokens.
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


def remat_of(table: nnx.Variable, remat: Remat) -> Remat:
    """The policy by which tokens are scored: `remat` in a step, which takes gradients through the model of this table,
    and else `full`, as there is nothing to keep logits for."""
    return "full" if use_of(table) is None else remat


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
    x: Float[Array, "b t d"], table: Array | Shard, tokens: Int[Array, "b t"], *, remat: Remat = "full"
) -> tuple[Float[Array, "b t"], Bool[Array, "b t"]]:
    """The log-softmax of `logits(x, table)` at `tokens`, float32, and whether no other token has a higher logit."""
    found = token_scores(x, table, tokens, remat=remat)
    return found.log_prob, found.is_best


@jax.named_scope("log_probs")
def token_scores(
    x: Float[Array, "b t d"],
    table: Array | Shard,
    tokens: Int[Array, "b t"],
    head: Head = Head(),
    *,
    remat: Remat = "full",
    with_entropy: bool = False,
    with_mean: bool = False,
) -> TokenScores:
    """Log-probabilities of `tokens` by `logits(x, table, head)`, and what comes with them.

    Where `remat` keeps products with weights, logits are computed for all tokens at once and kept for the backward
    pass; else for a few tokens at a time, and recomputed.
    """
    if isinstance(table, Shard) and not table.has_rows:
        table = table.whole()
    rows = table.part if isinstance(table, Shard) else table
    narrow = jax.lax.stop_gradient(rows).astype(x.dtype)  # once, and not in every chunk
    score = functools.partial(_scores, table, narrow, head, with_entropy, with_mean)
    return score(x, tokens) if remat in ("none", "products", "dots") else in_chunks(score, x, tokens)


def in_chunks(score: Callable[[Any, Any], object], x: Float[Array, "b t d"], tokens: Int[Array, "b t"]) -> Any:
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

    return _before_gradients(jax.tree.map(joined, jax.lax.scan(chunk, None, (chunks(x), chunks(tokens)))[1]))


@jax.custom_vjp
def _before_gradients(found: object) -> Any:
    """What was found; its gradients wait until it is there. XLA would put off what only a loss or a metric reads, and
    keep the logits of a few tokens for it through the backward pass."""
    return found


def _after_found(found: object, gradients: object) -> tuple[Any]:
    leaves, tree = jax.tree.flatten(gradients)
    real = [n for n, leaf in enumerate(leaves) if leaf.dtype != jax.dtypes.float0]
    passed, _ = jax.lax.optimization_barrier(([leaves[n] for n in real], found))
    for n, gradient in zip(real, passed, strict=True):
        leaves[n] = gradient
    return (jax.tree.unflatten(tree, leaves),)


_before_gradients.defvjp(lambda found: (found, found), _after_found)


def _scores(
    table: Array | Shard,
    narrow: Array,
    head: Head,
    with_entropy: bool,
    with_mean: bool,
    x: Float[Array, "b t d"],
    tokens: Int[Array, "b t"],
) -> TokenScores:
    """Scores of all tokens at once. Of a table cut by rows each device computes the logits of its rows for all devices'
    tokens, and sums are returned.

    `narrow` is what the device has of the table, in the dtype of `x`.
    """
    axis = table.axis if isinstance(table, Shard) else None
    rows = table.part if isinstance(table, Shard) else table
    num_rows, num_devices, place = len(rows), 1, tokens
    if axis is not None:
        x, num_devices = jax.lax.all_gather(x, axis), jax.lax.axis_size(axis)  # devices b t d
        place = jax.lax.all_gather(tokens, axis) - jax.lax.axis_index(axis) * num_rows
    scores = head(_learned_products(x, narrow, rows))

    def total(share: Array) -> Float[Array, "b t"]:
        return share if axis is None else jax.lax.psum_scatter(share, axis)

    def mine(same: Array) -> Float[Array, "b t"]:
        return same if axis is None else same[jax.lax.axis_index(axis)]

    is_here = (place >= 0) & (place < num_rows)
    own = total(jnp.where(is_here, _at(scores, jnp.where(is_here, place, 0)), 0.0))
    highest = jax.lax.stop_gradient(scores).max(axis=-1)
    if axis is not None:
        highest = jax.lax.pmax(highest, axis)
    above = scores - jnp.broadcast_to(highest[..., None], scores.shape)
    masses = jnp.exp(above)
    mass = total(masses.sum(axis=-1))
    log_mass, highest = jnp.log(mass), mine(highest)
    return tree_of(
        TokenScores,
        log_prob=own - highest - log_mass,
        is_best=own >= highest,
        normalizer=highest + log_mass,
        entropy=log_mass - total((masses * above).sum(axis=-1)) / mass if with_entropy else None,
        mean_log_prob=total(above.sum(axis=-1)) / (num_rows * num_devices) - log_mass if with_mean else None,
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
    shape = *tokens.shape, size
    is_it = jax.lax.broadcasted_iota(tokens.dtype, shape, tokens.ndim) == jnp.broadcast_to(tokens[..., None], shape)
    return jnp.where(is_it, gradient[..., None], 0.0), None


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
