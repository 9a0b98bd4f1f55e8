"""How a network computes: the fields that configs of policies and of language models have in common.

Read next: `language.py`, `prompted.py`, `diffusion_policy.py`.
"""

import dataclasses
from typing import ClassVar, Literal, Self, get_args

import jax.numpy as jnp

from openpi_train.fields import setting
from openpi_train.models.compute import Compute
from openpi_train.models.model_config import ModelConfig
from openpi_train.nn.attention import Attention
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
    def compute(self) -> Compute:
        return Compute(
            dtype=jnp.dtype(self.dtype),
            remat="none" if self.remat == "auto" else self.remat,
            remat_choices=self.remat_policies if self.remat == "auto" else (self.remat,),
        )

    def with_compute(self, *, remat: Remat | None = None, attention: Attention | None = None) -> Self:
        del attention
        return dataclasses.replace(self, remat=remat or self.remat)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig(ComputeConfig):
    """A model with attention."""

    # Who computes attention: XLA, or cuDNN's fused kernels on NVIDIA GPUs.
    # auto: in training cuDNN on H100 and H200, if the run finds it right on its devices; else XLA.
    attention: Attention = setting("auto", on_resume="accept")

    @property
    def compute(self) -> Compute:
        """Subclasses add the heads, if cuDNN can compute all of them, and the sizes that tensor groups share out."""
        return dataclasses.replace(super().compute, attention=self.attention)

    def with_compute(self, *, remat: Remat | None = None, attention: Attention | None = None) -> Self:
        return dataclasses.replace(self, remat=remat or self.remat, attention=attention or self.attention)
