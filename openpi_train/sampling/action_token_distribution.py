"""`ActionTokenDistribution`: chunks that a policy says token by token (pi0-FAST).

Read next: `models/pi0_fast/pi0_fast_network.py`.
"""

import dataclasses
from typing import ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from openpi_train.fields import at_least
from openpi_train.nn.vocabulary import TokenScores
from openpi_train.sampling.action_distribution import LOG_PROBS, ActionDistribution, AnyArray, Kept, by_query
from openpi_train.sampling.action_sampler import ActionSampler, OwnSampler
from openpi_train.sampling.distribution import UnitScores
from openpi_train.types import Network, Observation, TokenChunkTraces, tree_of


class TokenChunkModel(Protocol):
    """A module that provides `chunk_tokens`."""

    def sample_chunk(
        self, observation: Observation, keys: Key[Array, " b"], temperature: float, max_tokens: int
    ) -> tuple[Int[Array, "b n"], Float[Array, "b n"], Int[Array, " b"], Float[Array, "b h a"]]:
        """Tokens after each prompt, their log-probabilities at the temperature, how many of them were drawn, and the
        normalised chunk that they say.
        """
        ...

    def chunk_scores(self, observation: Observation, tokens: Int[Array, "b n"], temperature: float) -> TokenScores:
        """The scores of these tokens after each prompt, with their entropy."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActionTokenDistribution(ActionDistribution):
    """Every token has its probability at the temperature. A unit is a token; the one that ends a chunk counts."""

    needs: ClassVar[frozenset[str]] = frozenset({"chunk_tokens"})

    # Divisor of the logits.
    temperature: float = 1.0
    # The most tokens of a chunk.
    max_tokens: int = at_least(1, 64)

    def check(self) -> list[str]:
        if 0 < self.temperature < float("inf"):
            return []
        return [f"temperature {self.temperature} must be above 0 and finite: else there is no chance to compare"]

    @property
    def action_sampler(self) -> ActionSampler:
        return OwnSampler(augmentation=self.augmentation)

    @property
    def num_units(self) -> int:
        return self.max_tokens

    def drawn(self, model, observation, keys, chunk):
        network: TokenChunkModel = model
        seen = self.seen(observation)
        tokens, log_probs, lengths, actions = network.sample_chunk(seen, keys, self.temperature, self.max_tokens)
        assert actions.shape[1:] == chunk
        return actions, {"tokens": tokens, "lengths": lengths, LOG_PROBS: log_probs}

    def kept_spec(self, chunk: tuple[int, int]) -> dict[str, jax.ShapeDtypeStruct]:
        shapes = {"tokens": (self.max_tokens,), "lengths": ()}
        return {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in shapes.items()}

    def lengths(self, kept: Kept) -> Int[np.ndarray, " b"]:
        return kept["lengths"]

    def sampling_log_probs(self, kept: Kept, is_executed: object) -> Float[np.ndarray, "b u"]:
        del is_executed  # a token says something of all actions
        return kept[LOG_PROBS]

    def traces(
        self,
        observation: Observation,
        kept: Kept,
        is_executed: object,
        row: AnyArray,
    ) -> TokenChunkTraces:
        del is_executed
        return tree_of(TokenChunkTraces, observation=observation, tokens=kept["tokens"], row=row)

    @jax.named_scope("distribution")
    def scores(self, model: Network, traces: TokenChunkTraces) -> UnitScores:
        """The log-probability and the entropy of every token, float32, of all queries in one pass."""
        network: TokenChunkModel = model
        observation, tokens = by_query((traces.observation, traces.tokens))
        found = network.chunk_scores(self.seen(observation), tokens, self.temperature)
        b = len(traces.tokens)
        assert found.entropy is not None
        return tree_of(UnitScores, log_prob=found.log_prob.reshape(b, -1), entropy=found.entropy.reshape(b, -1))


def with_chunk(observation: Observation, tokens: Int[Array, "b n"]) -> tuple[Observation, Int[Array, " b"]]:
    """The observation with these tokens after each prompt, one by one; and where the first one is.

    Prompts may have padding behind them only.
    """
    prompt, width = observation.prompt_tokens, observation.prompt_tokens.shape[1] + tokens.shape[1]
    first = observation.prompt_mask.sum(axis=1, dtype=jnp.int32)
    place = jnp.arange(width)
    behind = place - first[:, None]  # b w
    said: Bool[Array, "b w"] = (behind >= 0) & (behind < tokens.shape[1])
    chosen = jnp.take_along_axis(tokens, jnp.clip(behind, 0, tokens.shape[1] - 1), axis=1)
    whole = jnp.where(said, chosen, jnp.pad(prompt, ((0, 0), (0, tokens.shape[1]))))
    seen = dataclasses.replace(
        observation, prompt_tokens=whole, prompt_mask=behind < tokens.shape[1], token_ar_mask=said, token_loss_mask=said
    )
    return seen, first
