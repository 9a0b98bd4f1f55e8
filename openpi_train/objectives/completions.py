"""Log-probabilities of whole completions, for objectives that compare two of them. Read next: `preference.py`.

A row of a `PreferenceBatch` has up to two completions: that of segment 1 (chosen, desirable) and that of segment 2
(rejected, undesirable). Its tokens are those of positive weight.
"""

from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from openpi_train.types import Network, PreferenceBatch, TextBatch

CHOSEN, REJECTED = 0, 1
# A completion is counted as less likely than under the reference if its log-probability is lower by more than this.
# A smaller difference can be rounding: policy and reference are compiled differently.
FALL = 0.01
# Where the log-probabilities of the reference come from: the model's `reference`, or the batch.
ReferenceSource = Literal["model", "precomputed"]


def displacement(metrics: Mapping[str, float | None]) -> list[str]:
    """A warning if most chosen completions of an interval were less likely than under the reference."""
    if (metrics.get("chosen_fell") or 0.0) <= 0.5:
        return []
    return [
        "most chosen completions are less likely than under the reference (chosen_fell above 0.5). The policy may move "
        "to neither completion of a pair: compare samples, lower --lr-schedule.peak-lr, or for pairs give "
        "--objective.nll-weight 1"
    ]


def completion_mask(texts: TextBatch) -> Float[Array, "b n 2"]:
    """1 where a token is in the completion of segment 1 or 2, for all tokens of a row but the first."""
    is_target = texts.weights[:, 1:, None] > 0
    return (is_target & (texts.segments[:, 1:, None] == jnp.array([1, 2]))).astype(jnp.float32)


def completion_lengths(texts: TextBatch) -> Float[Array, "b 2"]:
    """Tokens of each completion; 0 where a row has no such completion."""
    return completion_mask(texts).sum(axis=1)


def is_pair(texts: TextBatch) -> Bool[Array, " b"]:
    """Whether a row has both completions. Rows that only fill a batch have none."""
    return (completion_lengths(texts) > 0).all(axis=1)


def completion_log_probs(model: Network, texts: TextBatch) -> Float[Array, "b 2"]:
    """The summed log-probability of each completion given its prompt; 0 where a row has no such completion."""
    x = model(texts.tokens, texts.positions, texts.segments)
    found = model.scores(x[:, :-1], texts.tokens[:, 1:])
    return (found.log_prob[..., None] * completion_mask(texts)).sum(axis=1)


def reference_log_probs(model: Network, batch: PreferenceBatch, source: ReferenceSource) -> Float[Array, "b 2"]:
    """As `completion_log_probs`, under the reference: of the batch if it was precomputed, or else of the model."""
    if source == "precomputed":
        if batch.reference_log_probs is None:
            raise ValueError("these batches have no reference_log_probs: the data must precompute them")
        return batch.reference_log_probs
    return jax.lax.stop_gradient(completion_log_probs(model.reference, batch.texts))
