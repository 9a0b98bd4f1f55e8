"""Models that are made of a language model, and the language model in any model.

Read next: `language.py`; `accompanied.py`, `reward.py`, which are made of one.
"""

import abc
import dataclasses
from typing import ClassVar

from openpi_train.models.compute import Compute
from openpi_train.models.language.language import LanguageConfig, TextModelConfig
from openpi_train.models.model_config import ModelConfig
from openpi_train.nn.attention import Attention
from openpi_train.nn.decoder_sizes import DecoderSizes
from openpi_train.parallel.remat import Remat


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageBasedConfig(TextModelConfig):
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
    def compute(self) -> Compute:
        return self.inner.compute

    def with_compute(self, *, remat: Remat | None = None, attention: Attention | None = None) -> "LanguageBasedConfig":
        return self.with_inner(self.inner.with_compute(remat=remat, attention=attention))


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
