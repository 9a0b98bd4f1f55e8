"""A language model that trains, with other networks beside it that only its training needs.

To all else the model is its policy. Read next: `reference.py`, `actor_critic.py`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from openpi_train.models.language.language import LanguageConfig
from openpi_train.models.language.language_part import LanguageBasedConfig
from openpi_train.models.model_config import ModelConfig
from openpi_train.nn.vocabulary import TokenScores

# What the paths of each part begin with.
POLICY, REFERENCE, CRITIC = "policy/", "reference/", "critic/"


class AccompaniedPolicy(nnx.Module):
    """A policy, and what subclasses put beside it."""

    def __init__(self, config: LanguageConfig, rngs: nnx.Rngs):
        self.policy = config.build(rngs)

    def __call__(
        self,
        tokens: Int[Array, "b t"],
        positions: Int[Array, "b t"] | None = None,
        segments: Int[Array, "b t"] | None = None,
    ) -> Float[Array, "b t d"]:
        """The policy's activations."""
        return self.policy(tokens, positions, segments)

    def scores(self, x: Float[Array, "b t d"], tokens: Int[Array, "b t"], **how: Any) -> TokenScores:
        """What the policy's activations say of these tokens."""
        return self.policy.scores(x, tokens, **how)

    def logits(self, x: Float[Array, "b t d"]) -> Float[Array, "b t v"]:
        """The policy's logits of every token of the vocabulary."""
        return self.policy.logits(x)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AccompaniedConfig(LanguageBasedConfig):
    """A language model that trains (`policy/`), and what is beside it. Checkpoints of the policy alone start it."""

    language_flags: ClassVar[str] = "--model.policy."

    # The model, without an adapter.
    policy: LanguageConfig

    def __post_init__(self):
        if self.policy.adapter.enabled:
            raise ValueError(
                "a policy with an adapter is its own reference, without the adapter: train the "
                f"{type(self.policy).__name__} itself"
            )

    @property
    def inner(self) -> LanguageConfig:
        return self.policy

    def with_inner(self, language: LanguageConfig) -> "AccompaniedConfig":
        return dataclasses.replace(self, policy=language)

    @property
    def smaller_runs(self) -> Sequence[str]:
        """The policy's, without its adapters."""
        return self.policy.smaller_runs[1:]

    def public_name(self, path: str) -> str:
        """The policy's parameters have Hugging Face's names; those of others have theirs after the part's name."""
        if path.startswith(POLICY):
            return self.policy.public_name(path.removeprefix(POLICY))
        part = next(part for part in (REFERENCE, CRITIC) if path.startswith(part))
        return part + self.policy.public_name(path.removeprefix(part))

    @property
    def parameter_groups(self) -> Mapping[str, str]:
        """The policy's."""
        return {name: f"{POLICY}(?:{pattern})" for name, pattern in self.policy.parameter_groups.items()}

    def frozen(self, path: str) -> bool:
        """The reference, if there is one."""
        return path.startswith(REFERENCE)

    def frozen_dtype(self, path: str) -> DTypeLike:
        """float32: a rounded reference differs from the policy before the first step."""
        del path
        return jnp.float32


def policy_of(model: ModelConfig) -> tuple[LanguageConfig, str] | None:
    """The language model whose texts this model gives, and the prefix of its parameters' paths; None if it has none."""
    if isinstance(model, LanguageConfig):
        return model, ""
    return (model.policy, POLICY) if isinstance(model, AccompaniedConfig) else None
