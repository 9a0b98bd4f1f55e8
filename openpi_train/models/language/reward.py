"""Reward models: a language model whose last token of a text is given a score. Read next: `language.py`."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from openpi_train.models.language.language import LanguageConfig
from openpi_train.models.language.language_part import LanguageBasedConfig
from openpi_train.models.model_config import Base
from openpi_train.models.param_rules import ParamRules
from openpi_train.parallel.params import ParamLeaves

DECODER, SCORE_HEAD = "decoder/", "score/"
SCORE = f"{SCORE_HEAD}weight"


class ScoreHead(nnx.Module):
    """Activations to a number, as transformers' models for sequence classification with one label."""

    def __init__(self, width: int):
        self.weight = nnx.Param(jnp.zeros((1, width), jnp.float32))

    def __call__(self, x: Float[Array, "b s d"]) -> Float[Array, "b s"]:
        """The scores, float32."""
        return jnp.einsum("bsd,od->bs", x.astype(jnp.float32), self.weight[...])


class RewardModel(nnx.Module):
    """A decoder and a score head. Rewards are zero at first."""

    def __init__(self, config: LanguageConfig, rngs: nnx.Rngs):
        self.decoder = config.build(rngs)
        self.score = ScoreHead(config.sizes.width)

    def rewards(
        self,
        tokens: Int[Array, "b t"],
        positions: Int[Array, "b t"],
        segments: Int[Array, "b t"],
        num_segments: int = 2,
    ) -> Float[Array, "b s"]:
        """The score of the last token of segments 1, 2, ... of each row; any number where a row has no such segment."""
        x = self.decoder(tokens, positions, segments)
        place = jnp.arange(tokens.shape[1])[None, :, None]
        is_own = segments[:, :, None] == jnp.arange(1, num_segments + 1)  # b t s
        last = jnp.where(is_own, place, 0).max(axis=1)  # b s
        with jax.named_scope("score"):
            return self.score(jnp.take_along_axis(x, last[..., None], axis=1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardConfig(LanguageBasedConfig):
    """A language model with a score head in place of its scores of tokens.

    With an adapter, its factors and the head train.
    """

    provides: ClassVar[frozenset[str]] = frozenset({"rewards"})
    language_flags: ClassVar[str] = "--model.language."

    # The language model. A table of its own that scores tokens is left out: nothing would train it.
    language: LanguageConfig

    @property
    def decoder(self) -> LanguageConfig:
        """The language model without a table that scores tokens."""
        return dataclasses.replace(self.language, sizes=dataclasses.replace(self.language.sizes, tied=True))

    @property
    def inner(self) -> LanguageConfig:
        return self.language

    def with_inner(self, language: LanguageConfig) -> "RewardConfig":
        return dataclasses.replace(self, language=language)

    @property
    def smaller_runs(self) -> Sequence[str]:
        return [line.replace("--model.", self.language_flags) for line in self.language.smaller_runs]

    def build(self, rngs: nnx.Rngs) -> RewardModel:
        return RewardModel(self.decoder, rngs)

    @property
    def param_rules(self) -> ParamRules:
        """Hugging Face's names of a model for sequence classification. With an adapter its factors and the head
        train."""
        score = ParamRules(groups={"score": ".*"}).published_below(SCORE_HEAD)
        return ParamRules.of_parts({DECODER: self.decoder.param_rules, SCORE_HEAD: score})

    @property
    def base(self) -> Base:
        """The language model, which starts the decoder."""

        def start(params: ParamLeaves) -> dict[str, Any]:
            return {DECODER + path: leaf for path, leaf in params.items() if path != "head"}

        return Base(model=self.language, start=start)

    def without_lora(self) -> "RewardConfig":
        return dataclasses.replace(self, language=self.language.without_lora())
