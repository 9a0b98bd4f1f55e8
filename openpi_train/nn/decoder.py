"""One decoder for the published language models: Gemma 1 to 3, Llama 3, SmolLM2, Qwen2.5 and 3, Mistral.

They differ only in their configuration (`decoder_sizes.py`). All layers are one stack, also if layers with a sliding
window alternate with others: the window and the kind of each layer are scanned along with its weights.
A tensor group splits heads and the MLP's width (`parallel/tensor.py`): weights then hold a device's own part.

Read next: `decoder_sizes.py`, `key_value_cache.py`, `models/language/language.py`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from openpi_train.nn.attention import Attention, attend, rotate
from openpi_train.nn.decoder_sizes import DecoderSizes
from openpi_train.nn.gated_mlp import GatedMlp
from openpi_train.nn.key_value_cache import KeyValueCache
from openpi_train.nn.lora import AdapterConfig, LoraWeight, without_additions
from openpi_train.nn.norms import RMSNorm, residual
from openpi_train.nn.rotary_frequencies import angles_at
from openpi_train.nn.vocabulary import Head, TokenScores, logits, remat_of, token_scores
from openpi_train.parallel.layers import each_layer, scan_layers, stack_layers
from openpi_train.parallel.params import Gathering, ParamKind
from openpi_train.parallel.remat import Remat, keep, keep_input
from openpi_train.parallel.shard import own_heads, spread, summed, take_rows, varies
from openpi_train.types import tree_of

# Sines and cosines of positions.
Angles = tuple[Array, Array]


def _weights(adapter: AdapterConfig, has_factors: bool, rngs: nnx.Rngs) -> Callable[..., LoraWeight]:
    """A function that makes weights, with low-rank factors if `has_factors`."""
    rank = adapter.rank if has_factors else 0

    def make(shape: tuple[int, ...], initializer: nnx.Initializer, kind=ParamKind(), inputs=1, outputs=1) -> LoraWeight:
        # As in PEFT: uniform within 1 / sqrt(inputs), and zero.
        axes = {"in_axis": tuple(range(-1 - inputs, -1)), "out_axis": -1}
        batch_axis = tuple(range(len(shape) - inputs - outputs))
        first = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform", batch_axis=batch_axis, **axes)
        factors: Any = {"inputs": inputs, "outputs": outputs, "initializers": (first, nnx.initializers.zeros_init())}
        return LoraWeight(shape, initializer, rank, adapter.scale, **factors, kind=kind, rngs=rngs)

    return make


class LanguageAttention(nnx.Module):
    """The weights of one layer's attention.

    Keys and values are made of the tokens themselves, or of something else, whose width is then `seen_width`.
    """

    def __init__(
        self,
        sizes: DecoderSizes,
        adapter: AdapterConfig,
        norm: Callable[[int], RMSNorm],
        rngs: nnx.Rngs,
        seen_width: int | None = None,
    ):
        d, n, k, c = sizes.width, sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
        seen = d if seen_width is None else seen_width
        lecun = nnx.initializers.lecun_normal
        weight = _weights(adapter, adapter.attention, rngs)
        self.query = weight((d, n, c), lecun(in_axis=-3, out_axis=(-2, -1)), outputs=2)
        per_entry = lecun(in_axis=-3, out_axis=(-2, -1), batch_axis=(0,))
        self.key_value = weight((2, seen, k, c), per_entry, ParamKind(by_entry=True), outputs=2)
        self.output = weight((n, c, d), lecun(in_axis=(-3, -2), out_axis=-1), inputs=2)
        self.has_biases, self.has_norms = sizes.biases, sizes.query_key_norms
        if self.has_biases:
            self.query_bias = nnx.Param(jnp.zeros((n, c)))
            self.key_value_bias = nnx.Param(jnp.zeros((2, k, c)))
        if self.has_norms:
            self.query_norm, self.key_norm = norm(c), norm(c)

    @jax.named_scope("attention")
    def heads(self, x: Float[Array, "b t d"], angles: Angles) -> tuple[Array, Array, Array]:
        """Queries "b t n c", keys and values "b t k c"; queries and keys are rotated."""
        own = spread(x, self.query.weight[...])
        query = self.query(own, "btd,dnc->btnc", "btd,dl->btl", "btl,lnc->btnc")
        # Key heads that are too few to split are computed on all devices, from `x`, whose gradient is then not summed.
        seen = own if varies(self.key_value.part) else x
        key, value = (
            self.key_value(seen, "btd,dkc->btkc", "btd,dl->btl", "btl,lkc->btkc", index=part) for part in (0, 1)
        )
        if self.has_biases:
            query = query + self.query_bias[...].astype(x.dtype)
            bias = self.key_value_bias[...].astype(x.dtype)
            key, value = key + bias[0], value + bias[1]
        if self.has_norms:
            query, key = self.query_norm(query)[0], self.key_norm(key)[0]
        return rotate(query, *angles), rotate(key, *angles), value

    @jax.named_scope("attention")
    def heads_across(
        self, x: Float[Array, "b t d"], seen: tuple[Float[Array, "b s e"], Float[Array, "b s e"]], angles: Angles
    ) -> tuple[Array, Array, Array]:
        """Queries "b t n c" of the tokens, rotated; keys and values "b s k c" of what is `seen`, as they are.

        Not for sizes with biases, or with norms of queries and keys.
        """
        assert not self.has_biases and not self.has_norms
        query = self.query(spread(x, self.query.weight[...]), "btd,dnc->btnc", "btd,dl->btl", "btl,lnc->btnc")
        key, value = (
            self.key_value(spread(one, self.key_value.part), "bse,ekc->bskc", "bse,el->bsl", "bsl,lkc->bskc", index=at)
            for at, one in enumerate(seen)
        )
        return rotate(query, *angles), key, value

    @jax.named_scope("attention")
    def from_heads(self, heads: Float[Array, "b t n c"]) -> Float[Array, "b t d"]:
        """Project heads back to the tokens' width."""
        # Sums run over axes in the order of their letters: that of the weight, or XLA would transpose it.
        return summed(self.output(heads, "bthk,hkd->btd", "bthk,hkl->btl", "btl,ld->btd"))


class LanguageLayer(nnx.Module):
    """One layer, in two parts: queries, keys and values; then attention and the MLP. A cache comes between them."""

    def __init__(
        self,
        sizes: DecoderSizes,
        adapter: AdapterConfig,
        *,
        dtype: DTypeLike,
        attention: Attention,
        rngs: nnx.Rngs,
        seen_width: int | None = None,
    ):
        def norm(width: int) -> RMSNorm:
            return RMSNorm(width, dtype=dtype, rngs=rngs, offset=float(sizes.norms_from_one), eps=sizes.norm_eps)

        self.attention_norm = norm(sizes.width)
        self.attention = LanguageAttention(sizes, adapter, norm, rngs, seen_width)
        self.mlp_norm = norm(sizes.width)
        mlp_weight = _weights(adapter, adapter.mlp, rngs)
        self.mlp = GatedMlp(sizes.width, sizes.mlp_dim, mlp_weight, sizes.activation)
        self.has_post_norms = sizes.post_norms
        if self.has_post_norms:
            self.attention_post_norm, self.mlp_post_norm = norm(sizes.width), norm(sizes.width)
        self.queries_per_key = sizes.num_heads // sizes.num_kv_heads
        self.scale, self.cap = sizes.query_scale, sizes.attention_cap
        self.kind: Attention = attention

    def heads(self, x: Float[Array, "b t d"], angles: Angles) -> tuple[Array, Array, Array]:
        """Queries, keys and values of the tokens."""
        return self.attention.heads(keep_input(self.attention_norm(x)[0]), angles)

    def heads_across(
        self, x: Float[Array, "b t d"], seen: tuple[Array, Array], angles: Angles
    ) -> tuple[Array, Array, Array]:
        """Queries of the tokens; keys and values of what is `seen`, for a layer that has its width."""
        return self.attention.heads_across(keep_input(self.attention_norm(x)[0]), seen, angles)

    def after(self, x: Float[Array, "b t d"], query: Array, key: Array, value: Array, mask: Array) -> Array:
        """The layer's output for tokens that attend to these keys and values where `mask` "b t s" is set."""

        def seen(heads: Array) -> Array:
            return spread(own_heads(keep(heads), query.shape[2], self.queries_per_key), query)

        attended = attend(keep(query), seen(key), seen(value), mask, self.kind, scale=self.scale, cap=self.cap)
        update = self.attention.from_heads(attended)
        x = keep(residual(x, self.attention_post_norm(update)[0] if self.has_post_norms else update))
        update = self.mlp(keep_input(self.mlp_norm(x)[0]))
        return residual(x, self.mlp_post_norm(update)[0] if self.has_post_norms else update)


class Decoder(nnx.Module):
    """The decoder.

    Args:
        sizes: sizes and kinds of its layers.
        adapter: low-rank additions to its weights.
        dtype: the type of activations; parameters are float32 and cast where they are used.
        remat, attention: how the backward pass and attention are computed; results do not depend on them.
    """

    def __init__(
        self,
        sizes: DecoderSizes,
        adapter: AdapterConfig,
        *,
        dtype: DTypeLike,
        remat: Remat,
        attention: Attention = "auto",
        rngs: nnx.Rngs,
    ):
        self.sizes, self.dtype = sizes, dtype
        self.remat: Remat = remat

        def table() -> nnx.Param:
            rows = nnx.initializers.normal(0.02)(rngs.params(), (sizes.vocab_size, sizes.width), jnp.float32)
            return nnx.Param(rows, kind=ParamKind(gathering=Gathering.BY_ROW))

        self.token_embedding = table()
        if not sizes.tied:
            self.head = table()
        self.layers = stack_layers(
            lambda rngs: LanguageLayer(sizes, adapter, dtype=dtype, attention=attention, rngs=rngs), sizes.depth, rngs
        )
        self.final_norm = RMSNorm(
            sizes.width, dtype=dtype, rngs=rngs, offset=float(sizes.norms_from_one), eps=sizes.norm_eps
        )

    @jax.named_scope("embed")
    def embed(self, tokens: Int[Array, "b t"]) -> Float[Array, "b t d"]:
        """Token embeddings in `dtype`. Their scale, if any, is rounded to that dtype, as in transformers."""
        x = take_rows(self.token_embedding.get_value(), tokens).astype(self.dtype)
        return x * jnp.asarray(math.sqrt(self.sizes.width), self.dtype) if self.sizes.scaled_embeddings else x

    def __call__(
        self,
        tokens: Int[Array, "b t"],
        positions: Int[Array, "b t"] | None = None,
        segments: Int[Array, "b t"] | None = None,
    ) -> Float[Array, "b t d"]:
        """The tokens' activations after all layers and the last norm, in `dtype`.

        Args:
            positions: of each token in its text; None: its index in the row.
            segments: the number of each token's text in its row; texts do not attend to each other, and 0 is padding.
                None: a row is one text.
        """
        return self._run(tokens, positions, segments, caching=False)[0]

    def prefill(
        self, tokens: Int[Array, "b t"], length: Int[Array, " b"]
    ) -> tuple[Float[Array, "b t d"], KeyValueCache]:
        """The activations of prompts, and a cache of their keys and values without free slots (see `grown`).

        Args: `length` is each prompt's number of tokens; padding comes after them.
        """
        is_token = jnp.arange(tokens.shape[1]) < length[:, None]
        x, kept = self._run(tokens, None, is_token.astype(jnp.int32), caching=True)
        keys, values = (tuple(jnp.swapaxes(one, 2, 3)) for one in kept)  # of "layers b t k c"
        return x, tree_of(KeyValueCache, keys=keys, values=values, length=length)

    def each_layer(self) -> list[LanguageLayer]:
        """The layers for `extend`. A loop makes them once, before it starts."""
        layers = each_layer(self.layers)
        for layer in layers:
            layer.attention.key_value.cut()
            layer.mlp.gate_up.cut()
        return layers

    def extend(
        self,
        tokens: Int[Array, "b t"],
        cache: KeyValueCache,
        layers: Sequence[LanguageLayer] | None = None,
    ) -> tuple[Float[Array, "b t d"], KeyValueCache]:
        """The activations of tokens that follow those in the cache, and the cache with these tokens added.

        In a loop that carries the cache it is written in place. A token without a free slot is not written.

        Args: `layers` is the result of `each_layer`; None: it is called here.
        """
        b, t = tokens.shape
        positions = cache.length[:, None] + jnp.arange(t)  # b t
        slots = jnp.broadcast_to(jnp.arange(cache.num_slots), (b, cache.num_slots))
        sight = self._sight(positions, slots, slots[:, None] <= positions[:, :, None])
        rows = jnp.arange(b)[:, None]

        def write(kept: Array, new: Array) -> Array:
            return kept.at[rows, :, positions].set(new.astype(kept.dtype), mode="drop", unique_indices=True)

        def read(kept: Array) -> Array:  # b s k c
            return jnp.swapaxes(kept, 1, 2).astype(x.dtype)

        x, keys, values = self.embed(tokens), list(cache.keys), list(cache.values)
        kinds = self._kinds()
        with jax.named_scope("decoder"):
            for number, layer in enumerate(self.each_layer() if layers is None else layers):
                angles, mask = sight(None if kinds is None else tuple(kind[number] for kind in kinds))
                query, key, value = layer.heads(x, angles)
                keys[number], values[number] = write(keys[number], key), write(values[number], value)
                x = layer.after(x, query, read(keys[number]), read(values[number]), mask)
        cache = tree_of(KeyValueCache, keys=tuple(keys), values=tuple(values), length=cache.length + t)
        return self.final_norm(x)[0], cache

    def logits(self, x: Float[Array, "b t d"], temperature: float = 1.0) -> Float[Array, "b t v"]:
        """Logits of every token of the vocabulary, float32."""
        return logits(x, self._table, Head(self.sizes.score_cap, temperature))

    def scores(
        self,
        x: Float[Array, "b t d"],
        tokens: Int[Array, "b t"],
        temperature: float = 1.0,
        *,
        with_entropy: bool = False,
        with_mean: bool = False,
    ) -> TokenScores:
        """Log-probabilities of these tokens, and more, float32 (`vocabulary.py: token_scores`)."""
        head, wanted = Head(self.sizes.score_cap, temperature), {"with_entropy": with_entropy, "with_mean": with_mean}
        return token_scores(x, self._table, tokens, head, remat=remat_of(self._table_variable, self.remat), **wanted)

    @property
    def reference(self) -> "Decoder":
        """The decoder without its low-rank additions: the model that adapters started from."""
        return without_additions(self)

    @property
    def _table(self) -> Any:
        return self._table_variable.get_value()

    @property
    def _table_variable(self) -> nnx.Param:
        return self.token_embedding if self.sizes.tied else self.head

    @jax.named_scope("decoder")
    def _run(self, tokens: Array, positions: Array | None, segments: Array | None, *, caching: bool) -> tuple[Any, Any]:
        t = tokens.shape[1]
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(t), tokens.shape)
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((t, t), bool)), (tokens.shape[0], t, t))
        if segments is not None:
            same = segments[:, :, None] == segments[:, None, :]
            mask &= same & (segments > 0)[:, None, :]
        sight = self._sight(positions, positions, mask)

        def body(layer: LanguageLayer, x: Array, kind: object) -> tuple[Array, Any]:
            angles, mask = sight(kind)
            query, key, value = layer.heads(x, angles)
            return layer.after(x, query, key, value, mask), (key, value) if caching else None

        x, kept = scan_layers(self.layers, body, self.embed(tokens), self._kinds(), remat=self.remat)
        return self.final_norm(x)[0], kept

    def _kinds(self) -> tuple[Array, Array] | None:
        """For each layer whether it has a window, and how many tokens it sees; None if no layer has one."""
        if self.sizes.window is None:
            return None
        slides = np.isin(np.arange(self.sizes.depth), self.sizes.sliding_layers)
        return jnp.asarray(slides), jnp.asarray(np.where(slides, self.sizes.window, np.iinfo(np.int32).max))

    def _sight(self, positions: Array, key_positions: Array, mask: Array) -> Callable[[Any], tuple[Angles, Array]]:
        """A function from a layer's kind to its rotary angles and its attention mask."""
        sizes = self.sizes
        wide = angles_at(positions, sizes.rope.of_head(sizes.head_dim))
        if sizes.window is None:
            return lambda _: (wide, mask)
        near = angles_at(positions, sizes.sliding_rope.of_head(sizes.head_dim))
        distance = positions[:, :, None] - key_positions[:, None, :]

        def of(kind: tuple[Array, Array]) -> tuple[Angles, Array]:
            slides, window = kind
            angles = jax.tree.map(lambda a, b: jnp.where(slides, a, b), near, wide)
            return angles, mask & (distance < window)

        return of
