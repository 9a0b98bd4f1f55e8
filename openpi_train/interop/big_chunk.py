"""Streaming decoder for zarr chunks that are too large to decode at once: holds at most one piece in memory.

A trainer on one device saves each array as one chunk, of up to 4.8 GB for pi0 in float32; tensorstore always decodes
whole chunks. Read next: `orbax_item.py`.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from openpi_train.interop.stored_leaves import Index, Piece, blocks, common, inside

_READ_BYTES = 8 << 20


def can_decode(array: Any) -> bool:
    """Whether the tensorstore array has a supported format: zarr 2, zstd, in C order, as Orbax writes it."""
    metadata = array.spec().to_json().get("metadata", {})
    return (
        metadata.get("zarr_format") == 2
        and (metadata.get("compressor") or {}).get("id") == "zstd"
        and not metadata.get("filters")
        and metadata.get("order") == "C"
        and not str(metadata.get("dtype")).startswith(">")
    )


def decode(array: Any, cell: Index, chunk: tuple[int, ...]) -> Iterator[Piece]:
    """Decode the part `cell` of a single chunk as pieces. Raises ValueError or OSError if the chunk is damaged."""
    import zstandard

    metadata = array.spec().to_json()["metadata"]
    dtype = np.dtype(array.dtype.numpy_dtype)
    place = [one.start // size for one, size in zip(cell, chunk, strict=True)]
    key = metadata.get("dimension_separator", ".").join(map(str, place)) or "0"
    box = tuple(slice(at * size, (at + 1) * size) for at, size in zip(place, chunk, strict=True))
    if array.kvstore.read(key, byte_range=slice(0, 1)).result().state == "missing":  # all of it is the fill value
        filling = metadata.get("fill_value") or 0
        yield from ((where, np.full(_shape(where), filling, dtype)) for where in blocks(cell, dtype.itemsize))
        return
    source: Any = _Bytes(array.kvstore, key)
    try:
        with zstandard.ZstdDecompressor().stream_reader(source, read_size=_READ_BYTES) as reader:
            left = math.prod(_shape(cell))
            for where in blocks(box, dtype.itemsize):
                values = _filled(reader, np.empty(_shape(where), dtype))
                if wanted := common(where, cell):
                    yield wanted, values[inside(wanted, where)]
                    left -= math.prod(_shape(wanted))
                if not left:
                    return
    except zstandard.ZstdError as error:
        raise ValueError(f"chunk {key}: {error}") from error


def _filled(reader: Any, values: np.ndarray) -> np.ndarray:
    """`values`, filled with the next values of the reader."""
    left = values.reshape(-1).view(np.uint8).data
    while left:
        count = reader.readinto(left)
        if not count:
            raise ValueError(f"a chunk ends {len(left)} bytes too early")
        left = left[count:]
    return values


def _shape(index: Index) -> list[int]:
    return [one.stop - one.start for one in index]


class _Bytes:
    """A value in a tensorstore key-value store, as a file for sequential reading."""

    def __init__(self, store: Any, key: str):
        self._store, self._key, self._at = store, key, 0

    def read(self, size: int) -> bytes:
        """The next bytes; none at the end."""
        try:
            found = self._store.read(self._key, byte_range=slice(self._at, self._at + size)).result()
        except ValueError as error:  # fewer bytes are left than requested
            if "OUT_OF_RANGE" not in str(error):
                raise
            found = self._store.read(self._key, byte_range=slice(self._at, None)).result()
        self._at += len(found.value)
        return bytes(found.value)
