"""`data fit-fast`: fit a FAST tokenizer to the action chunks of an experiment, and measure it on held-out chunks.

Read next: `data/tokenizers/fast_tokenizer.py`.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.data.robot.opened import OpenedDatasets, open_data
from openpi_train.data.robot.rows import Rows
from openpi_train.data.robot.transforms import padded
from openpi_train.data.tokenizers.fast_tokenizer import fit_fast
from openpi_train.experiment import Experiment


def fit(experiment: Experiment, out: Path, *, vocab_size: int, scale: float, max_chunks: int) -> str:
    """Fit to the experiment's training chunks, normalised and padded as its model sees them, and save to `out`.

    At most `max_chunks` are used, spread evenly; datasets count by their weights.

    Returns a report: the tokenizer's statistics on held-out chunks, or without any on the same ones.

    Raises ValueError if `out` is not empty, or there is nothing to fit.
    """
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty; give a new directory with --out")
    model: Any = experiment.policy  # one of those that pad actions to a width
    config = experiment.demonstrations
    data = open_data(
        config,
        shape=model.rows.window,
        seed=experiment.seed,
        transforms=(),
        batch_spec=model.rows.batch_spec,
        normalization=model.rows.normalization,
        assets_dir=experiment.assets_dir,
    )
    training = chunks_of(data, data.train, model.action_dim, max_chunks)
    fast = fit_fast(training, vocab_size=vocab_size, scale=scale)
    directory = fast.save(out)
    others = chunks_of(data, data.validation or data.train, model.action_dim, max_chunks)
    tokens = [fast.encode(chunk) for chunk in others]
    lengths = [len(each) for each in tokens]
    decoded = [fast.decode(each, *others.shape[1:]) for each in tokens]
    assert not any(again is None for again in decoded), "a chunk's own tokens are a chunk"
    errors, num_values = np.array(decoded) - others, math.prod(others.shape[1:])
    return (
        f"fitted {fast.vocab_size} tokens to {len(training)} chunks, saved in {directory}\n"
        f"on {len(others)} {'the same' if data.validation is None else 'held-out'} chunks of {num_values} values: "
        f"{np.mean(lengths):.1f} tokens a chunk, at most {max(lengths)} ({num_values / np.mean(lengths):.1f} values a "
        f"token); what comes back is off by {np.sqrt(np.mean(errors**2)):.4f} (root mean square), at most "
        f"{np.abs(errors).max():.4f}, in normalised units\n"
        f"use it with --model.fast-tokenizer {directory}"
    )


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
