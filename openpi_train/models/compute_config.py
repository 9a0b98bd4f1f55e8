"""How a network computes: the fields that configs of policies and of language models have in common.

Read next: `language.py`, `prompted.py`, `diffusion_policy.py`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, Self, get_args

import jax.numpy as jnp
from jax.typing import DTypeLike

from openpi_train.fields import setting
from openpi_train.models.model_config import ModelConfig
from openpi_train.nn.attention import Attention, Heads
from openpi_train.parallel.remat import Remat, RematChoice


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputeConfig(ModelConfig):
    """A model whose layers compute in one type, and recompute activations as they are told."""

    # The policies that `remat` can name, least recomputation first.
    remat_policies: ClassVar[tuple[Remat, ...]] = get_args(Remat)

    # Type of the activations. Parameters are float32.
    dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    # What the backward pass recomputes: nothing; what is neither input nor output of a product with weights; all but
    # these outputs; all but attention; whole layers.
    # auto: the one with the shortest step of those with which the run fits its devices, by the plan.
    remat: RematChoice = setting("auto", on_resume="accept")

    @property
    def compute_dtype(self) -> DTypeLike:
        """The `dtype` field."""
        return jnp.dtype(self.dtype)

    @property
    def needs_loss_scale(self) -> bool:
        return self.dtype == "float16"

    @property
    def used_remat(self) -> Remat:
        """`remat`; `none` if `auto` was not resolved, as in programs without a backward pass."""
        return "none" if self.remat == "auto" else self.remat

    def remat_choices(self) -> Mapping[str | None, Self]:
        names = self.remat_policies if self.remat == "auto" else (self.remat,)
        return {name: dataclasses.replace(self, remat=name) for name in names}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig(ComputeConfig):
    """A model with attention."""

    # Who computes attention: XLA, or cuDNN's fused kernels on NVIDIA GPUs.
    # auto: in training cuDNN on H100 and H200, if the run finds it right on its devices; else XLA.
    attention: Attention = setting("auto", on_resume="accept")

    @property
    def heads(self) -> Sequence[Heads]:
        """The heads of all its attention, if cuDNN can compute it (default: it cannot)."""
        return ()

    @property
    def attention_kind(self) -> Attention:
        return self.attention

    @property
    def attention_heads(self) -> Sequence[Heads]:
        return self.heads if self.attention == "auto" else ()

    def with_attention(self, kind: Attention) -> Self:
        return dataclasses.replace(self, attention=kind)
