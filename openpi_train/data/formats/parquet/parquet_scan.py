"""Reads one parquet file of episodes into small arrays, and copies its pictures out. Read next: `parquet_index.py`."""

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.data.core import image
from openpi_train.data.formats.lerobot.episodes import copy_pictures
from openpi_train.data.formats.lerobot.lerobot_metadata import require
from openpi_train.data.formats.lerobot.parquet_numbers import amount, numbers

# The column that marks an episode's first step, and the column of instructions.
FIRST, PROMPT = "is_first", "prompt"


@dataclasses.dataclass(frozen=True)
class ScannedFile:
    """The index entries of one file.

    Attributes:
        starts: int64 [episodes]: the row of each episode's first step.
        columns: [rows, ...] by name.
        spans: byte offset and size in the copied pictures, by camera, int64 [rows, 2].
        prompts: the instruction of each row.
        digests: of each episode's content.
        skipped: columns left out, each with the reason.
    """

    starts: np.ndarray
    columns: Mapping[str, np.ndarray]
    spans: Mapping[str, np.ndarray]
    prompts: list[str]
    digests: list[str]
    skipped: Mapping[str, str]

    @property
    def layout(self) -> tuple[Any, ...]:
        """What all files of a dataset have in common: cameras, and columns with their shapes."""
        return sorted(self.spans), sorted((name, column.shape[1:]) for name, column in self.columns.items())


def scan_file(file: Path, pictures: Path) -> ScannedFile:
    """Read a file's columns, and copy its pictures to `pictures`.

    Raises ValueError or OSError if it cannot be read, or has no rows.
    """
    pa = require("pyarrow")
    columns: dict[str, np.ndarray] = {}
    skipped: dict[str, str] = {}
    with require("pyarrow.parquet").ParquetFile(file) as parquet:
        schema = parquet.schema_arrow
        binary = [
            field.name for field in schema if pa.types.is_binary(field.type) or pa.types.is_large_binary(field.type)
        ]
        table = parquet.read(columns=[name for name in schema.names if name not in binary])
        num_rows = table.num_rows
        if not num_rows:
            raise ValueError("it has no rows")
        cameras = [
            name for name in binary if _is_whole(parquet, name, skipped) and not _is_deep(parquet, name, skipped)
        ]
        copied, _ = copy_pictures(parquet, cameras, pictures) if cameras else ({}, {})
    for name in (name for name in table.column_names if name not in (FIRST, PROMPT)):
        try:
            columns[name] = _numeric(table[name], pa)
        except ValueError as error:
            skipped[name] = str(error)
    first = np.asarray(table[FIRST].to_pylist(), bool) if FIRST in table.column_names else np.zeros(num_rows, bool)
    starts = np.union1d([0], np.flatnonzero(first)).astype(np.int64)
    prompts = _prompts(table[PROMPT].to_pylist()) if PROMPT in table.column_names else [""] * num_rows
    digests = []
    for start, end in zip(starts.tolist(), [*starts[1:].tolist(), num_rows], strict=True):
        digest = hashlib.sha256("\n".join(dict.fromkeys(prompts[start:end])).encode())
        for name, column in sorted(columns.items()):
            digest.update(f"{name} {column.dtype} {column.shape[1:]}".encode())
            digest.update(column[start:end].tobytes())
        for name in cameras:
            digest.update(copied[name][1][start:end].tobytes())
        digests.append(digest.hexdigest()[:32])
    return ScannedFile(
        starts=starts,
        columns=columns,
        spans={name: spans for name, (spans, _) in copied.items()},
        prompts=prompts,
        digests=digests,
        skipped=skipped,
    )


def _prompts(values: list[Any]) -> list[str]:
    """The instruction of each row. Raises ValueError if one is no text."""
    for row, value in enumerate(values):
        if not (value is None or isinstance(value, str)):
            raise ValueError(f"row {row}: {PROMPT} is {type(value).__name__}, not a text; is this a table of texts?")
    return [text or "" for text in values]


def _is_whole(parquet: Any, name: str, skipped: dict[str, str]) -> bool:
    """Whether every row has a picture; else the reason is recorded."""
    missing = sum(batch.column(0).null_count for batch in parquet.iter_batches(columns=[name]))
    if missing:
        skipped[name] = f"{missing} pictures are missing"
    return not missing


def _is_deep(parquet: Any, name: str, skipped: dict[str, str]) -> bool:
    """Whether the first picture is one of depth; then the reason is recorded."""
    first = next(parquet.iter_batches(columns=[name], batch_size=1)).column(0)[0].as_py()
    try:
        mode = image.pixel_mode(first)
    except ValueError:
        return False  # said where its size is read
    if image.is_deep(mode):
        skipped[name] = f"a depth map by its pixels, {mode}"
    return image.is_deep(mode)


def _numeric(column: Any, pa: Any) -> np.ndarray:
    """Numbers of the same shape in every row, float32 or int64. Raises ValueError for others."""
    kind, depth = column.type, 0
    while hasattr(kind, "value_type") and not pa.types.is_dictionary(kind):
        kind, depth = kind.value_type, depth + 1
    if pa.types.is_boolean(kind) or not (pa.types.is_floating(kind) or pa.types.is_integer(kind)) or depth > 1:
        raise ValueError(f"it holds {column.type}, not numbers")
    shape = ()
    if depth:
        lengths = require("pyarrow.compute").list_value_length(column).drop_null().unique().to_pylist()
        if len(lengths) != 1:
            raise ValueError(f"its rows hold {', '.join(map(str, sorted(lengths)))} numbers")
        shape = (lengths.pop(),)
    values, counts = numbers(column, "int64" if pa.types.is_integer(kind) else "float32", shape)
    if (wrong := np.flatnonzero(counts != np.prod(shape, dtype=np.int64))).size:
        raise ValueError(f"row {wrong[0]} is {amount(int(counts[wrong[0]]))}")
    return values
