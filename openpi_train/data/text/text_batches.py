"""Batches of texts from named arrays, their shapes, and the masking of rows. Read next: `opened_texts.py`."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from openpi_train.data.core.interface import RowSpec
from openpi_train.types import PreferenceBatch, TextBatch, tree_of


def batch_of(columns: Mapping[str, object]) -> TextBatch | PreferenceBatch:
    """The batch of the named entries of rows, arrays or shapes; preferences if they have a margin."""
    names = ("tokens", "segments", "positions", "weights", "row")
    texts = tree_of(TextBatch, **{name: columns[name] for name in names})
    if "margin" not in columns:
        return texts
    references = columns.get("reference_log_probs")
    return tree_of(PreferenceBatch, texts=texts, margin=columns["margin"], reference_log_probs=references)


def batch_shapes(spec: RowSpec, batch_size: int) -> TextBatch | PreferenceBatch:
    """The batch of rows of these shapes, with `jax.ShapeDtypeStruct` in place of arrays."""
    entries = {**spec, "row": ((), "int32")}
    return batch_of(
        {name: jax.ShapeDtypeStruct((batch_size, *shape), jnp.dtype(dtype)) for name, (shape, dtype) in entries.items()}
    )


def one_text_per_row(texts: Sequence[Sequence[int]], num_rows: int, length: int) -> dict[str, np.ndarray]:
    """Tokens, segments and positions of rows that each hold one text's tokens, int32 [num_rows, length].

    Rows without a text are padding.
    """
    columns = {name: np.zeros((num_rows, length), np.int32) for name in ("tokens", "segments", "positions")}
    for row, tokens in enumerate(texts):
        own = slice(len(tokens))
        columns["tokens"][row, own] = tokens
        columns["segments"][row, own] = 1
        columns["positions"][row, own] = np.arange(len(tokens))
    return columns


def mask_texts(batch: TextBatch | PreferenceBatch, real: Bool[Array, " b"]) -> TextBatch | PreferenceBatch:
    """The batch where only rows marked in `real` count: the others have no text: no segments, no targets."""
    if isinstance(batch, PreferenceBatch):
        return dataclasses.replace(batch, texts=_masked(batch.texts, real))
    return _masked(batch, real)


def _masked(texts: TextBatch, real: Bool[Array, " b"]) -> TextBatch:
    real = real[:, None]
    return dataclasses.replace(texts, segments=texts.segments * real, weights=texts.weights * real)
