"""`TokenDistribution`: how tokens are drawn, and their log-probabilities when drawn so.

Read next: `nn/token_limits.py`.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from openpi_train.fields import at_least
from openpi_train.nn.token_limits import RowSettings, limited
from openpi_train.nn.vocabulary import in_chunks
from openpi_train.sampling.distribution import Distribution, UnitScores
from openpi_train.types import Network, TokenTraces, tree_of

# Stands for the logarithm of no probability: its exponential is 0, and 0 times it is 0.
_NEVER = -1e30


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenDistribution(Distribution):
    """A token has its probability at the temperature, among the tokens that the limits leave and the tokenizer has.

    The limits are those of `SamplingSettings`, in the same order.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"token_scores"})

    # Divisor of the logits.
    temperature: float = 1.0
    # Only the k most probable tokens; 0: all.
    top_k: int = at_least(0, 0)
    # Only the most probable tokens that together have this probability.
    top_p: float = 1.0
    # Only tokens with at least this share of the most probable one's probability.
    min_p: float = at_least(0, 0.0)

    def check(self) -> list[str]:
        problems = []
        if not 0 < self.temperature < float("inf"):
            problems.append(
                f"temperature {self.temperature} must be above 0 and finite: without chance there is nothing to compare"
            )
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p {self.top_p} must be above 0 and at most 1")
        if self.min_p > 1:
            problems.append(f"min_p {self.min_p} must be at most 1")
        return problems

    @jax.named_scope("distribution")
    def scores(self, model: Network, traces: TokenTraces) -> UnitScores:
        """The log-probability and the entropy of every token but the first, float32.

        A recorded token counts as one that the limits leave, also if they would exclude it after an update: its
        probability then falls with its logit and does not jump to 0.
        """
        texts = traces.texts
        x = model(texts.tokens, texts.positions, texts.segments)

        def score(x: Float[Array, "b n d"], tokens: Int[Array, "b n"]) -> UnitScores:
            logits = model.logits(x) / self.temperature
            exists = jnp.arange(logits.shape[-1]) < traces.num_tokens[:, None, None]
            logits = jnp.where(exists, logits, _NEVER)
            own = jax.nn.one_hot(tokens, logits.shape[-1], dtype=bool)
            log_probs = jax.nn.log_softmax(jnp.where(self._kept(logits) | own, logits, _NEVER))
            return tree_of(
                UnitScores,
                log_prob=jnp.where(own, log_probs, 0.0).sum(axis=-1),
                entropy=-(jnp.exp(log_probs) * log_probs).sum(axis=-1),
            )

        return in_chunks(score, x[:, :-1], texts.tokens[:, 1:])

    def values(self, model: Network, traces: TokenTraces) -> Float[Array, "b u"]:
        """The value of each token's text up to the token before it."""
        texts = traces.texts
        return model.values(texts.tokens, texts.positions, texts.segments)[:, :-1]

    def _kept(self, logits: Float[Array, "b n v"]) -> Array:
        """Which tokens the limits leave."""
        if self.top_k == 0 and self.top_p == 1 and self.min_p == 0:
            return jnp.ones(logits.shape, bool)
        probs = jax.lax.stop_gradient(jax.nn.softmax(logits)).reshape(-1, logits.shape[-1])
        settings = tree_of(
            RowSettings,
            temperature=jnp.full(len(probs), self.temperature),
            top_k=jnp.full(len(probs), self.top_k),
            top_p=jnp.full(len(probs), self.top_p, jnp.float32),
            min_p=jnp.full(len(probs), self.min_p, jnp.float32),
        )
        return (limited(probs, settings) > 0).reshape(logits.shape)
