"""`data fit-fast`: fit a FAST tokenizer to the action chunks of an experiment, and measure it on held-out chunks.

Read next: `data/fast_tokenizer.py`.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.data.fast_tokenizer import FastTokenizer, fit_fast
from openpi_train.data.opened import OpenedDatasets, open_data
from openpi_train.data.rows import Rows
from openpi_train.data.transforms import padded


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fitted:
    """A fitted, saved tokenizer, and its statistics on `num_checked` chunks that are `held_out` or not."""

    directory: Path
    num_chunks: int
    vocab_size: int
    held_out: bool
    num_checked: int
    values_per_chunk: int
    mean_tokens: float
    most_tokens: int
    root_mean_square_error: float
    largest_error: float

    def text(self) -> str:
        """The report as text."""
        which = "held-out" if self.held_out else "the same"
        return (
            f"fitted {self.vocab_size} tokens to {self.num_chunks} chunks, saved in {self.directory}\n"
            f"on {self.num_checked} {which} chunks of {self.values_per_chunk} values: {self.mean_tokens:.1f} tokens a "
            f"chunk, at most {self.most_tokens} ({self.values_per_chunk / self.mean_tokens:.1f} values a token); what "
            f"comes back is off by {self.root_mean_square_error:.4f} (root mean square), at most "
            f"{self.largest_error:.4f}, in normalised units\n"
            f"use it with --model.fast-tokenizer {self.directory}"
        )


def fit(experiment: Any, out: Path, *, vocab_size: int, scale: float, max_chunks: int) -> Fitted:
    """Fit to the experiment's training chunks, normalised and padded as its model sees them, and save to `out`.

    At most `max_chunks` are used, spread evenly; datasets count by their weights.

    Raises ValueError if `out` is not empty, or there is nothing to fit.
    """
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty; give a new directory with --out")
    model, config = experiment.policy, experiment.demonstrations
    data = open_data(
        config,
        shape=model.window,
        seed=experiment.seed,
        transforms=(),
        batch_spec=model.batch_spec,
        normalization=model.normalization,
        assets_dir=experiment.assets_dir,
    )
    training = chunks_of(data, data.train, model.action_dim, max_chunks)
    fast = fit_fast(training, vocab_size=vocab_size, scale=scale)
    directory = fast.save(out)
    others = data.validation or data.train
    return _account(fast, directory, training, chunks_of(data, others, model.action_dim, max_chunks), data.validation)


def chunks_of(data: OpenedDatasets, rows: Rows, action_dim: int, most: int) -> np.ndarray:
    """At most `most` chunks [n, h, action_dim] of a split, float32, normalised; datasets in proportion to weights."""
    found = []
    sizes = np.array([len(window) for window in rows.windows])
    # As many as the weights allow without any chunk twice.
    total = min(most, int(min(sizes / rows.mixture.weights)))
    for window, transforms, weight in zip(rows.windows, rows.transforms, rows.mixture.weights, strict=True):
        count = max(1, round(total * weight))
        samples = np.linspace(0, len(window) - 1, min(count, len(window))).astype(np.int64)
        state, actions, _ = window.chunks(samples)
        row = {"state": state, "actions": actions}
        for transform in transforms:
            row = transform(row)
        found.append(padded("actions", row["actions"], action_dim))
    return np.concatenate(found)


def _account(
    fast: FastTokenizer, directory: Path, training: np.ndarray, others: np.ndarray, held_out: Rows | None
) -> Fitted:
    tokens: Sequence[list[int]] = [fast.encode(chunk) for chunk in others]
    decoded = [fast.decode(each, *others.shape[1:]) for each in tokens]
    errors = np.array([again - chunk for again, chunk in zip(decoded, others, strict=True) if again is not None])
    assert len(errors) == len(others), "a chunk's own tokens are a chunk"
    return Fitted(
        directory=directory,
        num_chunks=len(training),
        vocab_size=fast.vocab_size,
        held_out=held_out is not None,
        num_checked=len(others),
        values_per_chunk=math.prod(others.shape[1:]),
        mean_tokens=float(np.mean([len(each) for each in tokens])),
        most_tokens=max(map(len, tokens)),
        root_mean_square_error=float(np.sqrt(np.mean(errors**2))),
        largest_error=float(np.abs(errors).max()),
    )
