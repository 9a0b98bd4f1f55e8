"""The config of a language model: sizes, published names, low-rank adapters, trainable parameters, dtypes.

Read next: `nn/decoder.py` (the network), `hf_config.py` (sizes from published files), `hf_names.py`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Protocol, runtime_checkable

import tyro
from flax import nnx
from jaxtyping import Array, Int

from openpi_train.fields import at_least
from openpi_train.json_object import JsonObject
from openpi_train.models.compute import Compute
from openpi_train.models.compute_config import TransformerConfig
from openpi_train.models.language.hf_config import Family, family_of, sizes_of
from openpi_train.models.language.hf_names import PARTS, explain_hf, hf_name
from openpi_train.models.model_config import ModelConfig
from openpi_train.models.param_rules import ParamRules
from openpi_train.nn.decoder import Decoder
from openpi_train.nn.decoder_sizes import DecoderSizes
from openpi_train.nn.lora import AdapterConfig, merge_lora


@runtime_checkable
class PackedTexts(Protocol):
    """What counts the tokens of a batch of texts, of which a row holds one or several."""

    @property
    def segments(self) -> Int[Array, "b t"]:
        """The number of each token's text in its row; 0 is padding."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextModelConfig(ModelConfig):
    """A model of texts: a language model, or one that is made of it."""

    def num_tokens_seen(self, batch: PackedTexts, draws: int = 1) -> Int[Array, ""]:
        del draws
        return (batch.segments > 0).sum()


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageConfig(TransformerConfig, TextModelConfig):
    """A language model: Gemma, Llama, SmolLM2, Qwen or Mistral, depending on its sizes.

    Low-rank adapters on all weights, with everything else frozen: `--model.adapter.rank 16`.
    """

    provides: ClassVar[frozenset[str]] = frozenset({"token_scores"})

    # Set by `--model.path`: where family, sizes and context length were read from.
    path: Annotated[str | None, tyro.conf.Fixed, tyro.conf.Suppress] = None
    # The model_type of its published config.json.
    family: Family = "llama"
    # Sizes and kinds of its layers.
    sizes: DecoderSizes
    # Low-rank additions to its weights.
    adapter: AdapterConfig = dataclasses.field(default_factory=AdapterConfig)
    # The longest context that it was trained for, in tokens.
    context_length: int = at_least(1, 2048)

    def problems(self) -> list[str]:
        problems = self.sizes.check()
        if self.adapter.rank < 0:
            problems.append(f"adapter.rank {self.adapter.rank} must be at least 0")
        if self.adapter.enabled and not (self.adapter.attention or self.adapter.mlp):
            problems.append("adapter.rank is given and neither adapter.attention nor adapter.mlp")
        return problems

    @classmethod
    def published(cls, config: JsonObject, where: str, **fields: Any) -> "LanguageConfig":
        """The model of a config.json, with these fields changed. Raises CheckpointError as `sizes_of` does."""
        found: dict[str, Any] = {"family": family_of(config, where), "sizes": sizes_of(config, where)}
        if isinstance(length := config.get("max_position_embeddings"), int):
            found["context_length"] = length
        return cls(**(found | fields))

    def build(self, rngs: nnx.Rngs) -> Decoder:
        compute = self.compute
        return Decoder(
            self.sizes,
            self.adapter,
            dtype=compute.dtype,
            remat=compute.remat,
            attention=self.attention,
            rngs=rngs,
        )

    @property
    def compute(self) -> Compute:
        """cuDNN computes no products that are capped (Gemma 2)."""
        return dataclasses.replace(
            super().compute,
            heads=(self.sizes.heads,) if self.sizes.attention_cap is None else (),
            shared_sizes={"sizes.num_heads": self.sizes.num_heads, "sizes.mlp_dim": self.sizes.mlp_dim},
        )

    @property
    def smaller_runs(self) -> Sequence[str]:
        adapters = () if self.adapter.enabled else ("train low-rank adapters only: --model.adapter.rank 16",)
        return *adapters, "cut the texts shorter: --data.max-length"

    def check_objective(self, name: str, needs: frozenset[str]) -> list[str]:
        """As for all models; with an adapter the model without it is the reference."""
        if "reference" not in needs:
            return super().check_objective(name, needs)
        problems = super().check_objective(name, needs - {"reference"})
        if not self.adapter.enabled:
            problems.append(
                f"objective {name} compares with a reference, and this {type(self).__name__} has none: train an "
                "adapter (--model.adapter.rank 16), or a ReferencedConfig of this model; or, for "
                "preferences, precompute the reference's log-probabilities (--objective.reference precomputed)"
            )
        return problems

    @property
    def param_rules(self) -> ParamRules:
        """Hugging Face's names, without layer numbers. With an adapter only its factors are trained."""
        return ParamRules(
            public_name=lambda path: hf_name(path, self.sizes),
            groups=PARTS,
            frozen=lambda path: self.adapter.enabled and not path.endswith(("/lora_a", "/lora_b")),
            explain=explain_hf,
            merge_lora=lambda params: merge_lora(params, lambda _: self.adapter.scale, lambda _: None),
        )

    def without_lora(self) -> "LanguageConfig":
        return dataclasses.replace(self, adapter=AdapterConfig())
