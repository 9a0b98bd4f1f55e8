"""Sizes of a Gemma decoder's experts: named variants and overrides. Read next: `gemma.py`."""

import dataclasses
import difflib
from collections.abc import Mapping

from openpi_train.nn.attention import Heads
from openpi_train.nn.lora import LoraConfig


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
        """Whether query, key and value share one weight, as in openpi if every query head has its own key."""
        return self.num_heads == self.num_kv_heads

    @property
    def heads(self) -> Heads:
        """Of every layer's attention."""
        return Heads(self.num_heads, self.num_kv_heads, self.head_dim)

    def check(self, name: str) -> list[str]:
        """What is wrong with the sizes, as sentences about the expert of this name."""
        problems = []
        if self.num_heads % self.num_kv_heads:
            problems.append(f"{name}: num_heads {self.num_heads} is not a multiple of {self.num_kv_heads}")
        if self.head_dim % 2 or self.width % 2:
            problems.append(f"{name}: head_dim {self.head_dim} and width {self.width} must be even")
        return problems


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
    """Sizes that differ from a named variant's; None keeps the variant's. See `GemmaConfig`, `LoraConfig`."""

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

    def without_lora(self) -> "GemmaOverrides":
        """These overrides without low-rank factors."""
        return dataclasses.replace(self, lora_attention_rank=0, lora_mlp_rank=0)

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
