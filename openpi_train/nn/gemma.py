"""Gemma's decoder (Gemma Team 2024) for one or more experts whose tokens interact only in attention.

Each expert has its own width and weights; in every layer all experts' tokens are projected to heads of one shape,
attend to those of their own and of earlier experts, and are projected back (pi0, Black et al. 2024, appendix B; openpi
`models/gemma.py`).
A tensor group splits heads and the MLP's width (`parallel/tensor.py`): weights then hold a device's own part.

Read next: `models/pi0/pi0.py`, which defines the experts' inputs.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from openpi_train.nn.attention import Attention, attend, rotary_angles, rotate
from openpi_train.nn.gated_mlp import GatedMlp
from openpi_train.nn.gemma_sizes import GemmaConfig
from openpi_train.nn.lora import LoraWeight
from openpi_train.nn.norms import RMSNorm, residual
from openpi_train.nn.vocabulary import log_probs, logits, remat_of
from openpi_train.parallel.layers import scan_all_but_last, scan_layers, scan_to_last, stack_layers
from openpi_train.parallel.params import Gathering, ParamKind
from openpi_train.parallel.remat import Remat, keep, keep_input
from openpi_train.parallel.shard import own_heads, spread, summed, take_rows, varies

Tokens = dict[str, Float[Array, "b _ _"]]
Conditions = Mapping[str, Float[Array, "b _ _"]]
# Keys and values of every layer: two arrays "layers b s k c".
Cache = tuple[Array, Array]


class Expert(nnx.Module):
    """One expert's weights in one layer."""

    def __init__(self, config: GemmaConfig, condition_width: int | None, *, dtype: DTypeLike, rngs: nnx.Rngs):
        lora, width, c = config.lora, config.width, config.head_dim
        n, k = config.num_heads, config.num_kv_heads

        def weight(shape: tuple[int, ...], initializer: nnx.Initializer) -> LoraWeight:
            return LoraWeight(shape, initializer, lora.attention_rank, lora.attention_scale, rngs=rngs)

        def mlp_weight(shape: tuple[int, ...], initializer: nnx.Initializer, kind: ParamKind) -> LoraWeight:
            return LoraWeight(shape, initializer, lora.mlp_rank, kind=kind, rngs=rngs)

        lecun = nnx.initializers.lecun_normal
        self.attention_norm = RMSNorm(width, condition_width, dtype=dtype, rngs=rngs)
        self.fused = config.fused_projection
        if self.fused:
            self.query_key_value = weight((3, n, width, c), lecun(in_axis=-2, out_axis=-1, batch_axis=(0, 1)))
        else:
            self.query = weight((n, width, c), lecun(in_axis=-2, out_axis=-1, batch_axis=(0,)))
            self.key_value = weight((2, k, width, c), lecun(in_axis=-2, out_axis=-1, batch_axis=(0, 1)))
        self.output = weight((n, c, width), lecun(in_axis=(-3, -2), out_axis=-1))
        self.mlp_norm = RMSNorm(width, condition_width, dtype=dtype, rngs=rngs)
        self.mlp = GatedMlp(width, config.mlp_dim, mlp_weight)

    @jax.named_scope("attention")
    def heads(self, x: Float[Array, "b t d"], *, with_queries: bool = True) -> tuple[Array | None, Array, Array]:
        """Queries "b t n c" (None without `with_queries`), keys and values "b t k c"."""
        several = ("btd,pkdc->btpkc", "btd,pkdl->btpkl", "btpkl,pklc->btpkc")
        one = ("btd,ndc->btnc", "btd,ndl->btnl", "btnl,nlc->btnc")
        own = spread(x, (self.query_key_value if self.fused else self.query).weight[...])
        if self.fused and with_queries:
            query, key, value = jnp.moveaxis(self.query_key_value(own, *several), 2, 0)
            return query, key, value
        if self.fused:
            return None, self.query_key_value(own, *one, index=1), self.query_key_value(own, *one, index=2)
        # Key heads that are too few to split are computed by all devices: from `x`, whose gradient is then not summed.
        key, value = jnp.moveaxis(self.key_value(own if varies(self.key_value.weight[...]) else x, *several), 2, 0)
        return self.query(own, *one) if with_queries else None, key, value

    @jax.named_scope("attention")
    def from_heads(self, heads: Float[Array, "b t n c"]) -> Float[Array, "b t d"]:
        """Project back to the expert's width. The low-rank part sums its factors over heads separately, as openpi
        does."""
        return summed(self.output(heads, "btnc,ncd->btd", "btnc,ncl->btl", "btl,nld->btd"))


def _spans(tokens: Tokens, names: Sequence[str]) -> dict[str, slice]:
    """The position range of each present expert's tokens."""
    spans, start = {}, 0
    for name in names:
        if name in tokens:
            spans[name] = slice(start, start := start + tokens[name].shape[1])
    return spans


def _gated(update: Array, gate: Array | None) -> Array:
    return update if gate is None else update * gate


class GemmaLayer(nnx.Module):
    """One layer of all experts."""

    def __init__(
        self,
        configs: Mapping[str, GemmaConfig],
        condition_widths: Mapping[str, int],
        *,
        dtype: DTypeLike,
        attention: Attention,
        rngs: nnx.Rngs,
    ):
        self.names = tuple(configs)
        self.queries_per_key = configs[self.names[0]].num_heads // configs[self.names[0]].num_kv_heads
        self.attention: Attention = attention
        self.experts = nnx.Dict(
            {name: Expert(configs[name], condition_widths.get(name), dtype=dtype, rngs=rngs) for name in self.names}
        )

    def __call__(
        self,
        tokens: Tokens,
        angles: tuple[Array, Array],
        mask: Array,
        conditions: Conditions,
        cache: Cache | None,
        wanted: Collection[str] | None = None,
    ) -> tuple[Tokens, Cache]:
        """The experts' tokens after this layer, and their keys and values; tokens also attend to cached ones.

        Each expert's queries are multiplied with the keys up to its own last token: none attends to a later expert's.
        For experts that are not `wanted` (None: all are) only keys and values are computed.
        """
        spans = _spans(tokens, self.names)
        wanted = [name for name in spans if wanted is None or name in wanted]
        queries, keys, values, gates = {}, [], [], {}
        for name in spans:
            normed, gates[name] = self.experts[name].attention_norm(tokens[name], conditions.get(name))
            query, key, value = self.experts[name].heads(keep_input(normed), with_queries=name in wanted)
            # Before the experts' keys are joined: XLA for GPUs then rotates and joins them in one kernel.
            own_angles = [angle[:, spans[name]] for angle in angles]
            if query is not None:
                queries[name] = rotate(query, *own_angles)
            keys.append(rotate(key, *own_angles))
            values.append(value)
        key, value = own = jnp.concatenate(keys, axis=1), jnp.concatenate(values, axis=1)
        num_cached = 0
        if cache is not None:
            num_cached = cache[0].shape[1]
            key, value = jnp.concatenate([cache[0], key], axis=1), jnp.concatenate([cache[1], value], axis=1)

        if wanted:
            key, value = (self._seen(x, queries[wanted[0]]) for x in (key, value))
        result = {}
        for name in wanted:
            expert, x, span = self.experts[name], tokens[name], spans[name]
            stop = num_cached + span.stop
            attended = attend(keep(queries[name]), key[:, :stop], value[:, :stop], mask[:, span, :stop], self.attention)
            x = keep(residual(x, _gated(expert.from_heads(attended), gates[name])))
            normed, gate = expert.mlp_norm(x, conditions.get(name))
            result[name] = residual(x, _gated(expert.mlp(keep_input(normed)), gate))
        return result, own

    def _seen(self, x: Array, query: Array) -> Array:
        """Keys or values as the device's query heads need them, whichever expert's."""
        return spread(own_heads(keep(x), query.shape[2], self.queries_per_key), query)


class Gemma(nnx.Module):
    """The decoder. The first expert owns the token embedding; experts' tokens are in the order of `configs`.

    Args:
        configs: sizes by expert name; depth and head shape must agree.
        vocab_size: size of the token table; 0 makes none.
        condition_widths: experts whose norms are adaptive, with the width of their condition.
        dtype: the type of activations; parameters are float32 and cast where they are used.
        remat, attention: how the backward pass and attention are computed; no result depends on it.
    """

    def __init__(
        self,
        configs: Mapping[str, GemmaConfig],
        vocab_size: int,
        condition_widths: Mapping[str, int],
        *,
        dtype: DTypeLike,
        remat: Remat,
        attention: Attention = "auto",
        rngs: nnx.Rngs,
    ):
        self.names = tuple(configs)
        self.dtype = dtype
        self.remat: Remat = remat
        first = configs[self.names[0]]
        self.head_dim = first.head_dim
        if vocab_size:
            table = nnx.initializers.normal()(rngs.params(), (vocab_size, first.width), jnp.float32)
            self.token_embedding = nnx.Param(table, kind=ParamKind(gathering=Gathering.BY_ROW))
        self.layers = stack_layers(
            lambda rngs: GemmaLayer(configs, condition_widths, dtype=dtype, attention=attention, rngs=rngs),
            first.depth,
            rngs,
        )
        self.final_norm = nnx.Dict(
            {
                name: RMSNorm(config.width, condition_widths.get(name), dtype=dtype, rngs=rngs)
                for name, config in configs.items()
            }
        )

    @jax.named_scope("embed")
    def embed(self, tokens: Int[Array, "b t"]) -> Float[Array, "b t d"]:
        """Token embeddings times the square root of their width, in `dtype`."""
        x = take_rows(self.token_embedding.get_value(), tokens)
        return (x * jnp.sqrt(x.shape[-1]).astype(x.dtype)).astype(self.dtype)

    def __call__(
        self,
        tokens: Mapping[str, Float[Array, "b _ _"]],
        positions: Int[Array, "b t"],
        mask: Bool[Array, "b t s"],
        conditions: Conditions | None = None,
        cache: Cache | None = None,
        wanted: Collection[str] | None = None,
    ) -> Tokens:
        """The tokens of every wanted expert after all layers and its final norm, in `dtype`.

        Args:
            tokens: "b t_i d_i" by expert; the t_i add up to t. An absent expert costs nothing.
            positions: one per token, over the experts in order.
            mask: which of the s keys (cached ones first) each token attends to. Nothing is read of it for keys of an
                expert after the token's own, to which none attends.
            conditions: "b r c" for each adaptive expert.
            cache: result of `keys_and_values` for earlier tokens.
            wanted: experts whose outputs are needed (None: all present ones). The last layer computes no others.
        """
        conditions = conditions or {}
        outputs, _ = self._run(tokens, positions, mask, conditions, cache, wanted=wanted, caching=False)
        return {name: self.final_norm[name](x, conditions.get(name))[0] for name, x in outputs.items()}

    def keys_and_values(
        self, tokens: Mapping[str, Float[Array, "b _ _"]], positions: Int[Array, "b t"], mask: Bool[Array, "b t t"]
    ) -> Cache:
        """Keys and values of these tokens in every layer, so that later tokens can attend to them without
        recomputation.

        For sampling, and for tokens whose whole path is frozen: it is not designed for a backward pass.
        """
        angles = rotary_angles(positions, self.head_dim)

        def body(layer: GemmaLayer, tokens: Tokens, wanted: Collection[str] | None = None):
            return layer(tokens, angles, mask, {}, None, wanted)

        inputs = {name: x.astype(self.dtype) for name, x in tokens.items()}
        with jax.named_scope("gemma"):
            inputs, kept, last = scan_all_but_last(self.layers, body, inputs)
            return jax.tree.map(lambda x, y: jnp.concatenate([x, y[None]]), kept, body(last, inputs, ())[1])

    def with_keys_and_values(
        self,
        tokens: Mapping[str, Float[Array, "b _ _"]],
        positions: Int[Array, "b t"],
        mask: Bool[Array, "b t s"],
        cache: Cache | None = None,
    ) -> tuple[Tokens, Cache]:
        """The result of `__call__`, and these tokens' own keys and values in every layer (without those in `cache`)."""
        outputs, own = self._run(tokens, positions, mask, {}, cache, wanted=None, caching=True)
        return {name: self.final_norm[name](x, None)[0] for name, x in outputs.items()}, own

    def logits(self, x: Float[Array, "b t d"]) -> Float[Array, "b t v"]:
        """Logits over the vocabulary, by the tied embedding table, float32."""
        return logits(x, self.token_embedding.get_value())

    def log_probs(
        self, x: Float[Array, "b t d"], tokens: Int[Array, "b t"]
    ) -> tuple[Float[Array, "b t"], Bool[Array, "b t"]]:
        """The log-probability of each of these tokens, float32, and whether it is the most likely."""
        table = self.token_embedding
        return log_probs(x, table.get_value(), tokens, remat=remat_of(table, self.remat))

    @jax.named_scope("gemma")
    def _run(self, tokens, positions, mask, conditions, cache, *, wanted, caching) -> tuple[Tokens, Any]:
        angles = rotary_angles(positions, self.head_dim)

        def body(layer: GemmaLayer, passed: tuple[Tokens, Any], cache: Cache | None, wanted=None):
            tokens, conditions = passed
            tokens, keys_and_values = layer(tokens, angles, mask, conditions, cache, wanted)
            return (tokens, conditions), keys_and_values if caching else None

        # The conditions are passed on, too: else XLA would put the products for their gradients off to the end, and
        # keep every layer's gathered weights until then.
        passed = {name: x.astype(self.dtype) for name, x in tokens.items()}, conditions
        if wanted is None or set(tokens) <= set(wanted):
            (tokens, _), own = scan_layers(self.layers, body, passed, cache, remat=self.remat)
            return tokens, own
        caches = jax.tree.map(lambda x: x[:-1], cache), jax.tree.map(lambda x: x[-1], cache)
        passed, _, last = scan_to_last(self.layers, body, passed, caches[0], remat=self.remat, dtype=self.dtype)
        # The backward pass begins with this layer and uses its activations at once, so recomputing them saves nothing.
        (tokens, _), own = body(last, passed, caches[1], wanted)
        return tokens, own
