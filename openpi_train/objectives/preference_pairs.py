"""Preference optimization without a reward model: DPO and its published variants, on pairs of completions.

The reference is a frozen copy of the policy (`models/language/reference.py`), the policy without its adapter, or
precomputed (`PreferenceBatch.reference_log_probs`). Formulas: `preference_losses.py`. Read next: `completions.py`.
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
    is_pair,
    reference_log_probs,
)
from openpi_train.objectives.objective import Metrics, Norms, Objective, RowValues
from openpi_train.objectives.preference_losses import VARIANTS, LossSettings, PairLogProbs, Variant
from openpi_train.types import Network, PreferenceBatch, pytree

VariantName = Literal[
    "sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "simpo", "orpo",
]  # fmt: skip


@pytree
class MatchedPairs:
    """A batch of pairs, and what each is compared with: see `PreferencePairs.prepared`."""

    pairs: PreferenceBatch
    quantiles: Float[Array, "b 2"]

    @property
    def row(self) -> Int[Array, " b"]:
        """The rows' positions in the global batch."""
        return self.pairs.row


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferencePairs(Objective):
    """The chosen completion of a pair should gain likelihood relative to the rejected one.

    The mean is taken over the pairs of the whole optimizer batch. Log-probabilities are summed over a completion's
    tokens; `ipo`, `sigmoid_norm`, `simpo` and `orpo` divide them by their number.

    These losses can lower the likelihood of both completions: watch `chosen_log_prob`, and `chosen_fell`, the share of
    pairs whose chosen completion is less likely than under the reference. `nll_weight` counteracts it.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"token_scores"})
    text_kinds: ClassVar[tuple[str, ...]] = ("preferences",)

    # The loss, by its usual name.
    variant: VariantName = "sigmoid"
    # How strongly the policy is held to the reference; the scale of rewards; for orpo the weight of the odds ratio.
    beta: float = 0.1
    # Probability that the labels of a pair are swapped; for sigmoid, sigmoid_norm, robust, exo_pair and aot.
    label_smoothing: float = 0.0
    # Difference of the rewards that simpo asks for.
    target_margin: float = 0.0
    # Weight of the chosen completion's negative log-likelihood per token; None: 1 for orpo, else 0.
    nll_weight: float | None = None
    # Where the reference's log-probabilities come from: the model, or the data.
    reference: ReferenceSource = "model"

    def __post_init__(self):
        problems, variant = [], VARIANTS[self.variant]
        if self.beta <= 0:
            problems.append(f"beta {self.beta} must be above 0")
        if self.label_smoothing and not variant.smooths:
            smooth = ", ".join(name for name, one in VARIANTS.items() if one.smooths)
            problems.append(f"label_smoothing is for {smooth}; {self.variant} has none")
        if not 0 <= self.label_smoothing < 0.5:
            problems.append(f"label_smoothing {self.label_smoothing} must be in [0, 0.5)")
        if self.variant == "exo_pair" and not self.label_smoothing:
            problems.append("exo_pair is infinite without label_smoothing; 0.001 is usual")
        if self.target_margin and not variant.has_margin:
            problems.append(f"target_margin is for simpo; {self.variant} has none")
        if self.nll_weight is not None and self.nll_weight < 0:
            problems.append(f"nll_weight {self.nll_weight} must be at least 0")
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def _used(self) -> Variant:
        return VARIANTS[self.variant]

    @property
    def _used_nll_weight(self) -> float:
        return self._used.nll_weight if self.nll_weight is None else self.nll_weight

    @property
    def needed(self) -> frozenset[str]:
        """`needs`, and a reference if the loss has one that is not precomputed."""
        asks = self._used.has_reference and self.reference == "model"
        return self.needs | ({"reference"} if asks else frozenset())

    @property
    def reads_reference(self) -> bool:
        """Whether the loss has a reference that is precomputed."""
        return self._used.has_reference and self.reference == "precomputed"

    def warnings(self, metrics: Mapping[str, float | None]) -> list[str]:
        """A warning if the chosen completions lose likelihood."""
        return displacement(metrics)

    def norms(self, batch: PreferenceBatch) -> Norms:
        """The number of pairs."""
        return {"pairs": jnp.maximum(is_pair(batch.texts).sum().astype(jnp.float32), 1.0)}

    def prepared(self, batch: PreferenceBatch, values_of: RowValues) -> PreferenceBatch | MatchedPairs:
        """The batch; for `aot` and `aot_unpaired` with the quantile that each pair is compared with.

        Alignment by optimal transport (Melnyk et al. 2024) compares sorted samples: k-th smallest with k-th smallest,
        in the whole batch. Which value a row is compared with therefore depends on all rows. A first pass without
        gradient finds it. The derivative of sorting is a permutation, so with these values fixed the gradient of each
        row's own term is exact, and rows add up in any order.

        `aot` sorts log(chosen / rejected) of the policy, and of the reference. `aot_unpaired` sorts
        log(policy / reference) of chosen completions, and of rejected ones.
        """
        if self.variant not in ("aot", "aot_unpaired"):
            return batch

        def of_rows(model: Network, rows: PreferenceBatch) -> Array:
            return jnp.stack([completion_log_probs(model, rows.texts), self._reference(model, rows)], axis=1)

        policy, reference = jnp.unstack(values_of(of_rows, batch), axis=1)  # each b 2
        counts = is_pair(batch.texts)
        if self.variant == "aot":
            ours, theirs = (values[:, CHOSEN] - values[:, REJECTED] for values in (policy, reference))
        else:
            ratio = policy - reference
            ours, theirs = ratio[:, CHOSEN], ratio[:, REJECTED]
        quantiles = jnp.stack([_of_equal_rank(ours, theirs, counts), _of_equal_rank(theirs, ours, counts)], axis=1)
        pairs = dataclasses.replace(batch, reference_log_probs=reference)
        return MatchedPairs(pairs=pairs, quantiles=quantiles)

    @jax.named_scope("loss")
    def loss(
        self,
        model: nnx.Module,
        batch: PreferenceBatch | MatchedPairs,
        norms: Norms,
        keys: Key[Array, " b"] | None,
        train: bool = True,
    ) -> tuple[Float[Array, ""], Metrics]:
        """This micro-batch's share of the mean loss, and of the metrics."""
        del keys, train
        pairs = batch.pairs if isinstance(batch, MatchedPairs) else batch
        counts, lengths = is_pair(pairs.texts), jnp.maximum(completion_lengths(pairs.texts), 1.0)
        sums = completion_log_probs(model, pairs.texts)  # b 2
        reference = pairs.reference_log_probs if isinstance(batch, MatchedPairs) else self._reference(model, pairs)
        assert reference is not None
        divisor = lengths if self._used.averages else jnp.ones_like(lengths)
        pair = _pair(sums / divisor, reference / divisor)

        def mean(values: Array) -> Array:
            return jnp.where(counts, values, 0.0).sum() / norms["pairs"]

        loss = mean(self._terms(pair, batch))
        rewards = {"chosen": self.beta * pair.chosen_ratio, "rejected": self.beta * pair.rejected_ratio}
        metrics = {
            "chosen_log_prob": mean(sums[:, CHOSEN]),
            "rejected_log_prob": mean(sums[:, REJECTED]),
            **{f"{name}_reward": mean(reward) for name, reward in rewards.items()},
            "reward_margin": mean(rewards["chosen"] - rewards["rejected"]),
            "pair_accuracy": mean(rewards["chosen"] > rewards["rejected"]),
        }
        if self._used.has_reference:
            metrics["chosen_fell"] = mean(pair.chosen_ratio < -FALL)
        if self._used_nll_weight:
            metrics["nll"] = -mean(sums[:, CHOSEN] / lengths[:, CHOSEN])
            loss = loss + self._used_nll_weight * metrics["nll"]
        return loss, {"loss": loss, **metrics}

    def _terms(self, pair: PairLogProbs, batch: PreferenceBatch | MatchedPairs) -> Float[Array, " b"]:
        """The loss of each pair."""
        how = LossSettings(beta=self.beta, smoothing=self.label_smoothing, target_margin=self.target_margin)
        if not isinstance(batch, MatchedPairs):
            return self._used.loss(pair, how)
        nothing, (first, second) = jnp.zeros_like(pair.chosen), jnp.unstack(batch.quantiles, axis=1)
        if self.variant == "aot":
            return self._used.loss(dataclasses.replace(pair, reference_chosen=first, reference_rejected=nothing), how)
        # Every quantile of both sides stands in one term with a gradient; the value is that of the first terms.
        terms = self._used.loss(dataclasses.replace(pair, rejected=first, reference_rejected=nothing), how)
        others = self._used.loss(dataclasses.replace(pair, chosen=second, reference_chosen=nothing), how)
        return terms + others - jax.lax.stop_gradient(others)

    def _reference(self, model: Network, pairs: PreferenceBatch) -> Float[Array, "b 2"]:
        if not self._used.has_reference:
            return jnp.zeros((len(pairs.row), 2))
        return reference_log_probs(model, pairs, self.reference)


def _pair(policy: Float[Array, "b 2"], reference: Float[Array, "b 2"]) -> PairLogProbs:
    return PairLogProbs(
        chosen=policy[:, CHOSEN],
        rejected=policy[:, REJECTED],
        reference_chosen=reference[:, CHOSEN],
        reference_rejected=reference[:, REJECTED],
    )


def _of_equal_rank(
    own: Float[Array, " b"], others: Float[Array, " b"], counts: Bool[Array, " b"]
) -> Float[Array, " b"]:
    """For each row, the value of `others` whose rank is that of the row's `own`, among the rows that count."""
    order = jnp.argsort(jnp.where(counts, own, jnp.inf))
    ranked = jnp.sort(jnp.where(counts, others, jnp.inf))
    return jnp.where(counts, jnp.zeros_like(own).at[order].set(ranked), 0.0)
