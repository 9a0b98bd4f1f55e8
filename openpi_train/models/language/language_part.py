"""Models that are made of a language model, and the language model in any model.

Read next: `language.py`; `accompanied.py`, `reward.py`, which are made of one.
"""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

from jax.typing import DTypeLike
from jaxtyping import Array, Int

from openpi_train.models.language.language import LanguageConfig, PackedTexts
from openpi_train.models.model_config import ModelConfig
from openpi_train.nn.attention import Attention, Heads
from openpi_train.nn.decoder_sizes import DecoderSizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageBasedConfig(ModelConfig, abc.ABC):
    """A model made of a language model, whose checkpoints start it: its sizes, and how it computes, are that one's."""

    # How the flags of the language model begin.
    language_flags: ClassVar[str]

    @property
    @abc.abstractmethod
    def inner(self) -> LanguageConfig:
        """The language model."""

    @abc.abstractmethod
    def with_inner(self, language: LanguageConfig) -> "LanguageBasedConfig":
        """This config with another language model."""

    @property
    def sizes(self) -> DecoderSizes:
        return self.inner.sizes

    @property
    def context_length(self) -> int:
        """The longest text that it takes, in tokens."""
        return self.inner.context_length

    @property
    def compute_dtype(self) -> DTypeLike:
        return self.inner.compute_dtype

    @property
    def needs_loss_scale(self) -> bool:
        return self.inner.needs_loss_scale

    def remat_choices(self) -> Mapping[str | None, "LanguageBasedConfig"]:
        return {name: self.with_inner(language) for name, language in self.inner.remat_choices().items()}

    @property
    def attention_kind(self) -> Attention:
        return self.inner.attention

    @property
    def attention_heads(self) -> Sequence[Heads]:
        return self.inner.attention_heads

    def with_attention(self, kind: Attention) -> "LanguageBasedConfig":
        return self.with_inner(self.inner.with_attention(kind))

    def check_tensor(self, tensor_devices: int) -> list[str]:
        return self.inner.check_tensor(tensor_devices)

    def num_tokens_seen(self, batch: PackedTexts, draws: int = 1) -> Int[Array, ""]:
        return self.inner.num_tokens_seen(batch, draws)

    @property
    def base(self) -> LanguageConfig:
        return self.inner


def language_of(model: ModelConfig) -> LanguageConfig | None:
    """The language model in this model; None if it has none."""
    if isinstance(model, LanguageBasedConfig):
        return model.inner
    return model if isinstance(model, LanguageConfig) else None


def language_flags(model: ModelConfig) -> str:
    """How the flags of the language model in this model begin: `--model.`, and the name of its field if it has one."""
    return model.language_flags if isinstance(model, LanguageBasedConfig) else "--model."


def with_language(model: ModelConfig, language: LanguageConfig) -> ModelConfig:
    """The model with another language model in it. It must have one (`language_of`)."""
    if isinstance(model, LanguageBasedConfig):
        return model.with_inner(language)
    assert isinstance(model, LanguageConfig), f"a {type(model).__name__} has no language model in it"
    return language
