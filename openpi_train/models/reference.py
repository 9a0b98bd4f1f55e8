"""A language model beside a frozen copy of it, for objectives that hold a policy to where it started.

A policy with an adapter needs no copy: its reference is itself without the adapter (`nn/decoder.py`).
Read next: `language.py`, `objectives/preference_pairs.py`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from openpi_train.models.language import LanguageConfig, PackedTexts
from openpi_train.models.model_config import ModelConfig
from openpi_train.nn.decoder_sizes import DecoderSizes
from openpi_train.nn.vocabulary import TokenScores

POLICY, REFERENCE = "policy/", "reference/"


class PolicyAndReference(nnx.Module):
    """A policy, and the reference that it was copied to. To all else it is the policy."""

    def __init__(self, config: LanguageConfig, rngs: nnx.Rngs):
        self.policy = config.build(rngs)
        self.reference = nnx.clone(self.policy)

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
class ReferencedConfig(ModelConfig):
    """A language model that trains (`policy/`), and a frozen copy of its first state (`reference/`).

    No frozen parameter is rounded: policy and reference are equal at first, bit for bit.
    """

    provides: ClassVar[frozenset[str]] = frozenset({"token_scores", "reference"})

    # The model, without an adapter.
    policy: LanguageConfig

    def __post_init__(self):
        if self.policy.adapter.enabled:
            raise ValueError(
                "a policy with an adapter is its own reference, without the adapter: train the "
                f"{type(self.policy).__name__} itself"
            )

    @property
    def sizes(self) -> DecoderSizes:
        """The policy's."""
        return self.policy.sizes

    @property
    def context_length(self) -> int:
        """The policy's: the longest text that it takes, in tokens."""
        return self.policy.context_length

    @property
    def compute_dtype(self) -> Any:
        """The policy's."""
        return self.policy.compute_dtype

    @property
    def needs_loss_scale(self) -> bool:
        return self.policy.needs_loss_scale

    def remat_choices(self) -> Mapping[str | None, "ReferencedConfig"]:
        choices = self.policy.remat_choices().items()
        return {name: dataclasses.replace(self, policy=policy) for name, policy in choices}

    def build(self, rngs: nnx.Rngs) -> PolicyAndReference:
        return PolicyAndReference(self.policy, rngs)

    def check_tensor(self, tensor_devices: int) -> list[str]:
        return self.policy.check_tensor(tensor_devices)

    def num_tokens_seen(self, batch: PackedTexts, draws: int = 1) -> Int[Array, ""]:
        return self.policy.num_tokens_seen(batch, draws)

    def public_name(self, path: str) -> str:
        """The policy's parameters have Hugging Face's names; the reference's have them after `reference/`."""
        if path.startswith(REFERENCE):
            return REFERENCE + self.policy.public_name(path.removeprefix(REFERENCE))
        return self.policy.public_name(path.removeprefix(POLICY))

    @property
    def base(self) -> LanguageConfig:
        """The policy's own checkpoints."""
        return self.policy

    def from_base(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Policy and reference start from the same."""
        return {part + path: leaf for part in (POLICY, REFERENCE) for path, leaf in params.items()}

    @property
    def parameter_groups(self) -> Mapping[str, str]:
        """The policy's."""
        return {name: f"{POLICY}(?:{pattern})" for name, pattern in self.policy.parameter_groups.items()}

    def frozen(self, path: str) -> bool:
        """The reference."""
        return path.startswith(REFERENCE)

    def frozen_dtype(self, path: str) -> Any:
        """float32: a rounded reference differs from the policy before the first step."""
        del path
        return jnp.float32


def policy_of(model: ModelConfig) -> tuple[LanguageConfig, str] | None:
    """The language model whose texts this model gives, and the prefix of its parameters' paths; None if it has none."""
    if isinstance(model, LanguageConfig):
        return model, ""
    return (model.policy, POLICY) if isinstance(model, ReferencedConfig) else None
