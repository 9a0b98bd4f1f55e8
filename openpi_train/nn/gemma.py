"""Gemma's decoder (Gemma Team 2024) for one or more experts whose tokens meet in attention only.

Each expert has its own width and weights; in every layer all experts' tokens are projected to heads of one shape,
attend jointly, and go their own ways again (pi0, Black et al. 2024, appendix B; openpi `models/gemma.py`).

Read next: `models/pi0.py`, which says what the experts read.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from openpi_train.nn.attention import attend, rotary_angles, rotate
from openpi_train.nn.layers import Remat, RMSNorm, scan_layers, stack_layers
from openpi_train.nn.lora import LoraConfig, LoraWeight

Tokens = dict[str, Float[Array, "b _ _"]]
Conditions = Mapping[str, Float[Array, "b _ _"]]
# Keys and values of every layer: two arrays "layers b s k c".
Cache = tuple[Array, Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmaConfig:
    """Sizes of one expert."""

    width: int
    depth: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)

    @property
    def fused_projection(self) -> bool:
        """Whether query, key and value share one weight, as openpi has it where every query head has its own key."""
        return self.num_heads == self.num_kv_heads

    def flops_per_token(self) -> float:
        """Forward FLOPs of one token in the weights of all layers, two per multiply-add, without adaptive norms."""
        heads, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        weights = 2 * self.width * heads + 2 * self.width * keys + 3 * self.width * self.mlp_dim
        low_rank = self.lora.attention_rank * (
            self.num_heads * self.width + heads  # query, head by head
            + 2 * self.num_kv_heads * self.width + 2 * keys  # key and value
            + heads + self.width  # output
        )  # fmt: skip
        low_rank += self.lora.mlp_rank * 3 * (self.width + self.mlp_dim)
        return float(2 * self.depth * (weights + low_rank))


_GEMMA_2B = GemmaConfig(width=2048, depth=18, mlp_dim=16_384, num_heads=8, num_kv_heads=1, head_dim=256)
_GEMMA_300M = dataclasses.replace(_GEMMA_2B, width=1024, mlp_dim=4096)
_DUMMY = GemmaConfig(width=64, depth=4, mlp_dim=128, num_heads=8, num_kv_heads=1, head_dim=16)

VARIANTS: Mapping[str, GemmaConfig] = {
    "gemma_2b": _GEMMA_2B,
    "gemma_300m": _GEMMA_300M,
    "dummy": _DUMMY,
    "gemma_2b_lora": dataclasses.replace(_GEMMA_2B, lora=LoraConfig(attention_rank=16, mlp_rank=16, alpha=16.0)),
    "gemma_300m_lora": dataclasses.replace(_GEMMA_300M, lora=LoraConfig(attention_rank=32, mlp_rank=32, alpha=32.0)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmaOverrides:
    """Sizes that differ from a named variant's; None means "as the variant has it". See `GemmaConfig`, `LoraConfig`."""

    # Width of the tokens.
    width: int | None = None
    # Number of layers.
    depth: int | None = None
    # Width inside the feed-forward layer.
    mlp_dim: int | None = None
    # Query heads.
    num_heads: int | None = None
    # Key and value heads; query heads share them evenly.
    num_kv_heads: int | None = None
    # Width of a head.
    head_dim: int | None = None
    # Rank of LoRA's additions to the attention weights; 0 means none.
    lora_attention_rank: int | None = None
    # Rank of LoRA's additions to the feed-forward weights; 0 means none.
    lora_mlp_rank: int | None = None
    # The attention's additions are scaled by alpha / rank, or with rslora by alpha / sqrt(rank).
    lora_alpha: float | None = None
    # Whether alpha is divided by the rank's square root.
    lora_rslora: bool | None = None

    def apply(self, variant: str) -> GemmaConfig:
        """The sizes of `variant` with these changes. Raises ValueError for an unknown variant."""
        if variant not in VARIANTS:
            closest = difflib.get_close_matches(variant, VARIANTS, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"unknown Gemma variant {variant!r}; known are {', '.join(VARIANTS)} (closest: {closest}). "
                f"Other sizes are set field by field, as in --model.language.width 64"
            )
        base = VARIANTS[variant]
        given = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        lora = {name.removeprefix("lora_"): given.pop(name) for name in list(given) if name.startswith("lora_")}
        return dataclasses.replace(base, **given, lora=dataclasses.replace(base.lora, **lora))


class Mlp(nnx.Module):
    """The gated feed-forward layer: down(gelu(gate x) * (up x))."""

    def __init__(self, config: GemmaConfig, *, rngs: nnx.Rngs):
        rank = config.lora.mlp_rank
        gated = nnx.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=(0,))
        self.gate_up = LoraWeight((2, config.width, config.mlp_dim), gated, rank, rngs=rngs)
        self.down = LoraWeight((config.mlp_dim, config.width), nnx.initializers.lecun_normal(), rank, rngs=rngs)

    def __call__(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        gate = self.gate_up(x, "btd,dm->btm", "btd,dl->btl", "btl,lm->btm", index=0)
        up = self.gate_up(x, "btd,dm->btm", "btd,dl->btl", "btl,lm->btm", index=1)
        return self.down(nnx.gelu(gate) * up, "btm,md->btd", "btm,ml->btl", "btl,ld->btd")


class Expert(nnx.Module):
    """One expert's weights in one layer."""

    def __init__(self, config: GemmaConfig, condition_width: int | None, *, dtype: Any, rngs: nnx.Rngs):
        lora, width, c = config.lora, config.width, config.head_dim
        n, k = config.num_heads, config.num_kv_heads

        def weight(shape: tuple[int, ...], initializer: nnx.Initializer) -> LoraWeight:
            return LoraWeight(shape, initializer, lora.attention_rank, lora.attention_scale, rngs=rngs)

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
        self.mlp = Mlp(config, rngs=rngs)

    def heads(self, x: Float[Array, "b t d"]) -> tuple[Array, Array, Array]:
        """Queries "b t n c", keys and values "b t k c"."""
        several = ("btd,pkdc->pbtkc", "btd,pkdl->pbtkl", "pbtkl,pklc->pbtkc")
        if self.fused:
            query, key, value = self.query_key_value(x, *several)
            return query, key, value
        query = self.query(x, "btd,ndc->btnc", "btd,ndl->btnl", "btnl,nlc->btnc")
        key, value = self.key_value(x, *several)
        return query, key, value

    def from_heads(self, heads: Float[Array, "b t n c"]) -> Float[Array, "b t d"]:
        """Back to the expert's width. The low-rank part sums its factors over heads separately, as openpi does."""
        return self.output(heads, "btnc,ncd->btd", "btnc,ncl->btl", "btl,nld->btd")


def _residual(x: Array, update: Array, gate: Array | None) -> Array:
    return x + update if gate is None else x + update * gate


class Layer(nnx.Module):
    """One layer of all experts."""

    def __init__(
        self,
        configs: Mapping[str, GemmaConfig],
        condition_widths: Mapping[str, int],
        *,
        dtype: Any,
        rngs: nnx.Rngs,
    ):
        self.names = tuple(configs)
        self.experts = nnx.Dict(
            {name: Expert(configs[name], condition_widths.get(name), dtype=dtype, rngs=rngs) for name in self.names}
        )

    def __call__(
        self, tokens: Tokens, angles: tuple[Array, Array], mask: Array, conditions: Conditions, cache: Cache | None
    ) -> tuple[Tokens, Cache]:
        """The experts' tokens after this layer, and the keys and values that were attended to (cached ones first)."""
        present = [name for name in self.names if name in tokens]
        heads, gates = [], {}
        for name in present:
            normed, gates[name] = self.experts[name].attention_norm(tokens[name], conditions.get(name))
            heads.append(self.experts[name].heads(normed))
        query, key, value = (jnp.concatenate(part, axis=1) for part in zip(*heads, strict=True))
        query, key = rotate(query, *angles), rotate(key, *angles)
        if cache is not None:
            key, value = jnp.concatenate([cache[0], key], axis=1), jnp.concatenate([cache[1], value], axis=1)
        attended = attend(query, key, value, mask)

        result, start = {}, 0
        for name in present:
            expert, x = self.experts[name], tokens[name]
            stop = start + x.shape[1]
            x = _residual(x, expert.from_heads(attended[:, start:stop]), gates[name])
            normed, gate = expert.mlp_norm(x, conditions.get(name))
            result[name] = _residual(x, expert.mlp(normed), gate)
            start = stop
        return result, (key, value)


class Gemma(nnx.Module):
    """The decoder. The first expert owns the token embedding; experts' tokens stand in the order of `configs`.

    Args:
        configs: sizes by expert name; depth and head shape must agree.
        condition_widths: experts whose norms are adaptive, with the width of their condition.
        dtype: the type of activations; parameters are float32 and cast where they are used.
    """

    def __init__(
        self,
        configs: Mapping[str, GemmaConfig],
        vocab_size: int,
        condition_widths: Mapping[str, int],
        *,
        dtype: Any,
        remat: Remat,
        rngs: nnx.Rngs,
    ):
        self.names = tuple(configs)
        self.dtype = dtype
        self.remat: Remat = remat
        first = configs[self.names[0]]
        self.head_dim = first.head_dim
        self.token_embedding = nnx.Param(
            nnx.initializers.normal()(rngs.params(), (vocab_size, first.width), jnp.float32)
        )
        self.layers = stack_layers(
            lambda rngs: Layer(configs, condition_widths, dtype=dtype, rngs=rngs), first.depth, rngs
        )
        self.final_norm = nnx.Dict(
            {
                name: RMSNorm(config.width, condition_widths.get(name), dtype=dtype, rngs=rngs)
                for name, config in configs.items()
            }
        )

    def embed(self, tokens: Int[Array, "b t"]) -> Float[Array, "b t d"]:
        """Token embeddings times the square root of their width, in `dtype`."""
        x = self.token_embedding[...][tokens]
        return (x * jnp.sqrt(x.shape[-1]).astype(x.dtype)).astype(self.dtype)

    def __call__(
        self,
        tokens: Mapping[str, Float[Array, "b _ _"]],
        positions: Int[Array, "b t"],
        mask: Bool[Array, "b t s"],
        conditions: Conditions | None = None,
        cache: Cache | None = None,
    ) -> Tokens:
        """Every present expert's tokens after all layers and its final norm, in `dtype`.

        Args:
            tokens: "b t_i d_i" by expert; the t_i add up to t. An absent expert costs nothing.
            positions: one per token, over the experts in order.
            mask: which of the s keys (cached ones first) each token sees.
            conditions: "b r c" for each adaptive expert.
            cache: what `keys_and_values` gave for the tokens that came before.
        """
        conditions = conditions or {}
        outputs, _ = self._run(tokens, positions, mask, conditions, cache, keep=False)
        return {name: self.final_norm[name](x, conditions.get(name))[0] for name, x in outputs.items()}

    def keys_and_values(
        self, tokens: Mapping[str, Float[Array, "b _ _"]], positions: Int[Array, "b t"], mask: Bool[Array, "b t t"]
    ) -> Cache:
        """Keys and values of these tokens in every layer, so that later tokens can attend to them at no new cost."""
        return self._run(tokens, positions, mask, {}, None, keep=True)[1]

    def _run(self, tokens, positions, mask, conditions, cache, *, keep):
        angles = rotary_angles(positions, self.head_dim)

        def body(layer: Layer, tokens: Tokens, cache: Cache | None):
            tokens, keys_and_values = layer(tokens, angles, mask, conditions, cache)
            return tokens, keys_and_values if keep else None

        tokens = {name: x.astype(self.dtype) for name, x in tokens.items()}
        return scan_layers(self.layers, body, tokens, cache, remat=self.remat)
