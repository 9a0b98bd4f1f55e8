"""The language model in a model: the model itself, the policy beside a reference, or what is below a score head.

Read next: `language.py`, `reference.py`, `reward.py`.
"""

import dataclasses

from openpi_train.models.language.accompanied import AccompaniedConfig
from openpi_train.models.language.language import LanguageConfig
from openpi_train.models.language.reward import RewardConfig
from openpi_train.models.model_config import ModelConfig


def language_of(model: ModelConfig) -> LanguageConfig | None:
    """The language model in this model; None if it has none."""
    match model:
        case LanguageConfig():
            return model
        case AccompaniedConfig():
            return model.policy
        case RewardConfig():
            return model.language
    return None


def language_flags(model: ModelConfig) -> str:
    """How the flags of the language model in this model begin: `--model.`, and the name of its field if it has one."""
    match model:
        case AccompaniedConfig():
            return "--model.policy."
        case RewardConfig():
            return "--model.language."
    return "--model."


def with_language(model: ModelConfig, language: LanguageConfig) -> ModelConfig:
    """The model with another language model in it. It must have one (`language_of`)."""
    match model:
        case AccompaniedConfig():
            return dataclasses.replace(model, policy=language)
        case RewardConfig():
            return dataclasses.replace(model, language=language)
    assert isinstance(model, LanguageConfig), f"a {type(model).__name__} has no language model in it"
    return language
