"""Preference optimization from single completions that are desirable or not: KTO (Ethayarajh et al. 2024).

Read next: `completions.py`, `preference_pairs.py`.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from openpi_train.objectives.completions import (
    CHOSEN,
    FALL,
    REJECTED,
    ReferenceSource,
    completion_lengths,
    completion_log_probs,
    displacement,
    reference_log_probs,
)
from openpi_train.objectives.objective import Metrics, Norms, Objective, RowValues
from openpi_train.types import Network, PreferenceBatch, TextBatch, pytree


@pytree
class JudgedBatch:
    """Judged completions, and the KL divergence with which their log-ratios are compared (one value for all rows)."""

    judged: PreferenceBatch
    baseline: Float[Array, " b"]

    @property
    def row(self) -> Int[Array, " b"]:
        """The rows' positions in the global batch."""
        return self.judged.row


@dataclasses.dataclass(frozen=True, kw_only=True)
class JudgedCompletions(Objective):
    """KTO: a desirable completion should gain likelihood by more than the policy's drift from the reference.

    With r = log(policy / reference) and z the drift, the loss is 1 - sigmoid(beta (r - z)) for a desirable completion
    and 1 - sigmoid(beta (z - r)) for another, averaged over all completions of the optimizer batch. A row with two
    completions counts as two.

    z is the mean of r over mismatched texts, each row's prompt with the next row's completion, and at least 0
    (as in the paper). It has no gradient. It is computed once for the whole optimizer batch, before the
    micro-batches (`prepared`), which all use the same value. Published code takes it from each micro-batch.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"token_scores"})
    text_kinds: ClassVar[tuple[str, ...]] = ("unpaired", "preferences")

    # How strongly the policy is held to the reference; the scale of rewards.
    beta: float = 0.1
    # Weight of desirable completions.
    desirable_weight: float = 1.0
    # Weight of undesirable completions.
    undesirable_weight: float = 1.0
    # What log-ratios are compared with: the drift, by a pass over mismatched texts; or zero, which saves this pass.
    baseline: Literal["mismatched", "zero"] = "mismatched"
    # Where the reference's log-probabilities come from: the model, or the data.
    reference: ReferenceSource = "model"

    def __post_init__(self):
        problems = []
        if self.beta <= 0:
            problems.append(f"beta {self.beta} must be above 0")
        if min(self.desirable_weight, self.undesirable_weight) < 0:
            problems.append(
                f"desirable_weight {self.desirable_weight} and undesirable_weight {self.undesirable_weight} must be "
                "at least 0"
            )
        if self.reference == "precomputed" and self.baseline == "mismatched":
            problems.append(
                "reference precomputed has no log-probabilities of mismatched texts: use baseline zero, or a model "
                "with a reference"
            )
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def needed(self) -> frozenset[str]:
        """`needs`, and a reference if it is not precomputed."""
        return self.needs | ({"reference"} if self.reference == "model" else frozenset())

    @property
    def reads_reference(self) -> bool:
        """Whether the reference is precomputed."""
        return self.reference == "precomputed"

    def warnings(self, metrics: Mapping[str, float | None]) -> list[str]:
        """A warning if the chosen completions lose likelihood."""
        return displacement(metrics)

    def norms(self, batch: PreferenceBatch) -> Norms:
        """The number of completions, and of the desirable and undesirable ones."""
        desirable, undesirable = jnp.unstack(_exists(batch.texts).sum(axis=0).astype(jnp.float32))
        return {
            "completions": jnp.maximum(desirable + undesirable, 1.0),
            "desirable": jnp.maximum(desirable, 1.0),
            "undesirable": jnp.maximum(undesirable, 1.0),
        }

    def prepared(self, batch: PreferenceBatch, values_of: RowValues) -> JudgedBatch:
        """The batch with its baseline."""
        if self.baseline == "zero":
            return JudgedBatch(judged=batch, baseline=jnp.zeros(batch.row.shape))
        counts = _exists(batch.texts).any(axis=1)
        ratios = values_of(self._ratios, dataclasses.replace(batch, texts=mismatched(batch.texts, counts)))  # b 2
        mean = jnp.where(counts, ratios[:, CHOSEN], 0.0).sum() / jnp.maximum(counts.sum(), 1)
        return JudgedBatch(judged=batch, baseline=jnp.broadcast_to(jax.nn.relu(mean), batch.row.shape))

    @jax.named_scope("loss")
    def loss(
        self, model: nnx.Module, batch: JudgedBatch, norms: Norms, keys: Key[Array, " b"] | None, train: bool = True
    ) -> tuple[Float[Array, ""], Metrics]:
        """This micro-batch's share of the mean loss, and of the metrics."""
        del keys, train
        judged, exists = batch.judged, _exists(batch.judged.texts)
        sums = completion_log_probs(model, judged.texts)  # b 2
        rewards = self.beta * (sums - reference_log_probs(model, judged, self.reference))
        signs = jnp.array([1.0, -1.0])
        above = signs * (rewards - self.beta * batch.baseline[:, None])
        weights = jnp.array([self.desirable_weight, self.undesirable_weight])
        terms = jnp.where(exists, weights * jax.nn.sigmoid(-above), 0.0)
        loss = terms.sum() / norms["completions"]

        def mean(values: Array, which: int, norm: str) -> Array:
            return jnp.where(exists[:, which], values[:, which], 0.0).sum() / norms[norm]

        desirable, undesirable = mean(rewards, CHOSEN, "desirable"), mean(rewards, REJECTED, "undesirable")
        return loss, {
            "loss": loss,
            "chosen_log_prob": mean(sums, CHOSEN, "desirable"),
            "rejected_log_prob": mean(sums, REJECTED, "undesirable"),
            "chosen_reward": desirable,
            "rejected_reward": undesirable,
            "reward_margin": desirable - undesirable,
            "chosen_fell": mean(rewards < -FALL * self.beta, CHOSEN, "desirable"),
            "kl": jnp.where(exists, batch.baseline[:, None], 0.0).sum() / norms["completions"],
        }

    def _ratios(self, model: Network, rows: PreferenceBatch) -> Float[Array, "b 2"]:
        return completion_log_probs(model, rows.texts) - reference_log_probs(model, rows, self.reference)


def _exists(texts: TextBatch) -> Bool[Array, "b 2"]:
    return completion_lengths(texts) > 0


def mismatched(texts: TextBatch, counts: Bool[Array, " b"]) -> TextBatch:
    """Each row's prompt with the completion of the next row that counts, the first following the last; segment 1.

    A completion is cut where it does not fit into the row. A row with two texts gives its first one.
    """
    b, t = texts.tokens.shape
    rank = jnp.cumsum(counts) - 1
    rows_that_count = jnp.argsort(~counts, stable=True)
    partner = rows_that_count[(rank + 1) % jnp.maximum(counts.sum(), 1)]  # b
    has_first = _exists(texts)[:, :1]
    is_own = texts.segments == jnp.where(has_first, 1, 2)
    is_completion = is_own & (texts.weights > 0)
    begin = jnp.argmax(is_own, axis=1)
    prompt_length = jnp.argmax(is_completion, axis=1) - begin
    length = is_own.sum(axis=1) - prompt_length  # of the completion

    place = jnp.broadcast_to(jnp.arange(t), (b, t))
    into = place - prompt_length[:, None]  # place in the completion, negative in the prompt
    from_prompt = jnp.take_along_axis(texts.tokens, jnp.minimum(begin[:, None] + place, t - 1), axis=1)
    source = (begin + prompt_length)[partner][:, None] + into
    from_completion = jnp.take_along_axis(texts.tokens[partner], jnp.clip(source, 0, t - 1), axis=1)
    weights = jnp.take_along_axis(texts.weights[partner], jnp.clip(source, 0, t - 1), axis=1)
    is_text = (into < length[partner][:, None]) & counts[:, None]
    return TextBatch(
        tokens=jnp.where(into < 0, from_prompt, from_completion),
        segments=is_text.astype(texts.segments.dtype),
        positions=place.astype(texts.positions.dtype),
        weights=jnp.where(is_text & (into >= 0), weights, 0.0),
        row=texts.row,
    )
