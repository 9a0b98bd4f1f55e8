"""Writes any source as a zarr replay buffer. Read next: `zarr_writer.py`."""

from pathlib import Path

import numpy as np

from openpi_train.data.core.source import stored_name
from openpi_train.data.formats.conversion import Conversion
from openpi_train.data.formats.zarr.store import ArrayInfo
from openpi_train.data.formats.zarr.zarr_layout import ABOUT
from openpi_train.data.formats.zarr.zarr_writer import Contents, write_store

# Rows of a column in a chunk. A chunk of pictures holds one, so that it can be read alone.
_COLUMN_ROWS = 4096


def write(conversion: Conversion, out: Path) -> None:
    """Write the conversion to `out`, continuing an interrupted attempt; pictures are stored as pixels, channels last.

    Raises FileExistsError, ValueError for arrays that would be read as something else, OSError.
    """
    source = conversion.source
    rows, sizes = source.num_steps, conversion.sizes
    names = {stored_name(name): name for name in (*conversion.columns, *source.cameras)}
    arrays = {}
    for stored, name in names.items():
        column = conversion.columns.get(name)
        if column is not None and column.ndim == 4 and 3 in (column.shape[1], column.shape[-1]):
            raise ValueError(
                f"{name} is {list(column.shape[1:])} per step, which a replay buffer's readers take for pictures"
            )
        if column is None:
            arrays[stored] = ArrayInfo((rows, *sizes[name], 3), np.dtype(np.uint8), 1)
        else:
            arrays[stored] = ArrayInfo(column.shape, column.dtype, min(rows, _COLUMN_ROWS))

    def read(stored: str, first: int, end: int) -> np.ndarray:
        name = names[stored]
        column = conversion.columns.get(name)
        return source.frames(np.arange(first, end), name) if column is None else np.asarray(column[first:end])

    contents = Contents(
        arrays=arrays,
        read=read,
        episode_ends=np.asarray(source.episode_ends, np.int64),
        tasks=[(prompt, prompt) for prompt in source.prompts],
        task_ids=np.asarray(source.prompt_index),
        identity={"source": source.fingerprint},
        attributes={ABOUT: conversion.about.as_json()},
    )
    write_store(contents, out)
