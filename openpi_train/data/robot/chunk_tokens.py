"""Number of FAST tokens in each sample's action chunk, counted once and cached beside the norm stats.

Read next: `core/text_lengths.py`, which uses it to choose the text length of batches, and
`tokenizers/fast_tokenizer.py`.
"""

import hashlib
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from openpi_train.data.core import files
from openpi_train.data.core.progress import Progress
from openpi_train.data.robot.transforms import Normalize, padded
from openpi_train.data.robot.windows import Windows
from openpi_train.data.tokenizers.fast_tokenizer import FastTokenizer

logger = logging.getLogger(__name__)

_BLOCK_SAMPLES = 4096


def chunk_tokens(
    window: Windows, normalize: Normalize, fast: FastTokenizer, action_dim: int, folder: Path
) -> np.ndarray:
    """The number of tokens in each sample's chunk, int32 [samples]; read from `folder` if counted before.

    Args: `normalize` is the dataset's normalisation; chunks are padded to `action_dim`. All processes may call it at
    the same time. Raises ValueError if actions have more dims, or if `fast` has no tokens for a chunk.
    """
    path = folder / f"chunk_tokens_{_key(window, normalize, fast, action_dim)}.npy"
    if path.is_file():
        try:
            return np.load(path)
        except (ValueError, EOFError) as error:
            logger.warning("action tokens: %s cannot be read (%s); counting again", path, error)
    started = time.monotonic()
    logger.info("action tokens: counting in %d chunks (only once; cached in %s)", len(window), path)
    counted = np.fromiter(_count(window, normalize, fast, action_dim), np.int32, len(window))
    with files.replacing(path) as file:
        np.save(file, counted)
    logger.info(
        "action tokens: %.1f per chunk on average, at most %d, counted in %.1f s",
        *(counted.mean(), counted.max(), time.monotonic() - started),
    )
    return counted


def _count(window: Windows, normalize: Normalize, fast: FastTokenizer, action_dim: int) -> Iterator[int]:
    progress = Progress("action tokens", len(window), "chunks")
    for start in range(0, len(window), _BLOCK_SAMPLES):
        state, actions, _ = window.chunks(np.arange(start, min(start + _BLOCK_SAMPLES, len(window))))
        chunks = padded("actions", normalize({"state": state, "actions": actions})["actions"], action_dim)
        yield from (len(fast.encode(chunk)) for chunk in chunks)
        progress.add(len(chunks))


def _key(window: Windows, normalize: Normalize, fast: FastTokenizer, action_dim: int) -> str:
    """A digest of everything that the counts depend on."""
    of_data = [window.source.fingerprint, repr(window.robot), repr(window.shape), window.split]
    stats = normalize.stats["actions"]
    numbers = {name: np.asarray(value).tolist() for name, value in vars(stats).items() if value is not None}
    parts = [*of_data, window.validation_fraction, normalize.form, numbers, fast.fingerprint, action_dim]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
