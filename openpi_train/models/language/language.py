"""The config of a language model: sizes, published names, low-rank adapters, trainable parameters, dtypes.

Read next: `nn/decoder.py` (the network), `hf_config.py` (sizes from published files), `hf_names.py`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Protocol, runtime_checkable

import tyro
from flax import nnx
from jaxtyping import Array, Int

from openpi_train.fields import at_least
from openpi_train.json_object import JsonObject
from openpi_train.models.compute_config import TransformerConfig
from openpi_train.models.language.hf_config import Family, family_of, sizes_of
from openpi_train.models.language.hf_names import PARTS, explain_hf, hf_name
from openpi_train.nn.attention import Heads
from openpi_train.nn.decoder import Decoder
from openpi_train.nn.decoder_sizes import DecoderSizes
from openpi_train.nn.lora import AdapterConfig, merge_lora
from openpi_train.parallel.params import ParamLeaves
from openpi_train.parallel.tensor import check_sizes


@runtime_checkable
class PackedTexts(Protocol):
    """What counts the tokens of a batch of texts, of which a row holds one or several."""

    @property
    def segments(self) -> Int[Array, "b t"]:
        """The number of each token's text in its row; 0 is padding."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageConfig(TransformerConfig):
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

    def __post_init__(self):
        problems = self.sizes.check()
        if self.adapter.rank < 0:
            problems.append(f"adapter.rank {self.adapter.rank} must be at least 0")
        if self.adapter.enabled and not (self.adapter.attention or self.adapter.mlp):
            problems.append("adapter.rank is given and neither adapter.attention nor adapter.mlp")
        if problems:
            raise ValueError(f"this {type(self).__name__} cannot be built: " + "; ".join(problems))

    @classmethod
    def published(cls, config: JsonObject, where: str, **fields: Any) -> "LanguageConfig":
        """The model of a config.json, with these fields changed. Raises CheckpointError as `sizes_of` does."""
        found: dict[str, Any] = {"family": family_of(config, where), "sizes": sizes_of(config, where)}
        if isinstance(length := config.get("max_position_embeddings"), int):
            found["context_length"] = length
        return cls(**(found | fields))

    def build(self, rngs: nnx.Rngs) -> Decoder:
        return Decoder(
            self.sizes,
            self.adapter,
            dtype=self.compute_dtype,
            remat=self.used_remat,
            attention=self.attention,
            rngs=rngs,
        )

    @property
    def heads(self) -> Sequence[Heads]:
        """None of its own if their products are capped (Gemma 2), which cuDNN does not."""
        return (self.sizes.heads,) if self.sizes.attention_cap is None else ()

    @property
    def smaller_runs(self) -> Sequence[str]:
        adapters = () if self.adapter.enabled else ("train low-rank adapters only: --model.adapter.rank 16",)
        return *adapters, "cut the texts shorter: --data.max-length"

    def check_tensor(self, tensor_devices: int) -> list[str]:
        shared = {"sizes.num_heads": self.sizes.num_heads, "sizes.mlp_dim": self.sizes.mlp_dim}
        return check_sizes(shared, tensor_devices)

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

    def num_tokens_seen(self, batch: PackedTexts, draws: int = 1) -> Int[Array, ""]:
        del draws
        return (batch.segments > 0).sum()

    def public_name(self, path: str) -> str:
        """Hugging Face's name, without layer numbers."""
        return hf_name(path, self.sizes)

    def explain(self, missing: list[str], extra: list[str], misshapen: list[str]) -> list[str]:
        return explain_hf(missing, extra, misshapen)

    @property
    def parameter_groups(self) -> Mapping[str, str]:
        return PARTS

    def frozen(self, path: str) -> bool:
        """With an adapter only its factors are trained."""
        return self.adapter.enabled and not path.endswith(("/lora_a", "/lora_b"))

    def without_lora(self) -> "LanguageConfig":
        return dataclasses.replace(self, adapter=AdapterConfig())

    def merge_lora(self, params: ParamLeaves) -> dict[str, Any]:
        """All parameters by path, the adapter folded into the weights: `without_lora()` computes the same."""
        return merge_lora(params, lambda _: self.adapter.scale, lambda _: None)
