"""Supervised fine-tuning of language models: cross entropy of the tokens that have a weight.

Read next: `nn/vocabulary.py`, which computes the log-probabilities, and `types.py` for `TextBatch`.
"""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from openpi_train.objectives.objective import Metrics, Norms, Objective
from openpi_train.types import TextBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class SupervisedText(Objective):
    """Cross entropy of next tokens, averaged over the tokens or the texts of the whole optimizer batch."""

    needs: ClassVar[frozenset[str]] = frozenset({"token_scores"})
    text_kinds: ClassVar[tuple[str, ...]] = ("texts",)

    # Every token counts the same, or every text, however long it is. A row may hold several texts.
    mean_over: Literal["tokens", "sequences"] = "tokens"
    # Share of the target that is spread over the whole vocabulary.
    label_smoothing: float = 0.0
    # Weight of the squared logarithm of the softmax's denominator (PaLM: 1e-4).
    z_loss: float = 0.0
    # Also report the entropy of the predictions. It costs another exponential per score.
    report_entropy: bool = False

    def __post_init__(self):
        if not 0 <= self.label_smoothing < 1 or self.z_loss < 0:
            raise ValueError(
                f"label_smoothing {self.label_smoothing} must be in [0, 1), and z_loss {self.z_loss} at least 0"
            )

    def target_weights(self, batch: TextBatch) -> Float[Array, "b n"]:
        """How much each token counts, for all tokens of a row but the first; those of a text sum to 1 if texts do."""
        weights = batch.weights[:, 1:]
        if self.mean_over == "tokens":
            return weights
        total = _text_totals(weights, batch.segments[:, 1:])
        return jnp.where(total > 0, weights / jnp.where(total > 0, total, 1.0), 0.0)

    def norms(self, batch: TextBatch) -> Norms:
        """The weight of all tokens, or the number of texts with a target."""
        return {"targets": jnp.maximum(self.target_weights(batch).sum(), 1e-6)}

    @jax.named_scope("loss")
    def loss(
        self, model: nnx.Module, batch: TextBatch, norms: Norms, keys: Key[Array, " b"] | None, train: bool = True
    ) -> tuple[Float[Array, ""], Metrics]:
        """This micro-batch's share of the mean loss, of the targets' mean log-probability and of the accuracy."""
        del keys, train
        language: Any = model
        x = language(batch.tokens, batch.positions, batch.segments)
        smoothing, weights = self.label_smoothing, self.target_weights(batch)
        found = language.scores(
            x[:, :-1], batch.tokens[:, 1:], with_entropy=self.report_entropy, with_mean=smoothing > 0
        )

        def mean(values: Array) -> Array:
            return (weights * values).sum() / norms["targets"]

        terms = -found.log_prob
        if smoothing:
            terms = (1 - smoothing) * terms - smoothing * found.mean_log_prob
        if self.z_loss:
            terms = terms + self.z_loss * jnp.square(found.normalizer)
        loss = mean(terms)
        metrics = {"loss": loss, "log_prob": mean(found.log_prob), "token_accuracy": mean(found.is_best)}
        return loss, metrics | ({"entropy": mean(found.entropy)} if self.report_entropy else {})


def _text_totals(weights: Float[Array, "b n"], segments: Array) -> Float[Array, "b n"]:
    """The summed weight of each token's text."""

    def of_row(weights: Array, segments: Array) -> Array:
        return jnp.zeros(len(segments) + 2).at[segments].add(weights)[segments]

    return jax.vmap(of_row)(weights, segments)
