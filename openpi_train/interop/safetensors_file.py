"""Reader and writer of safetensors files: reads parts through a memory map, writes tensor by tensor.

The format (huggingface/safetensors, README "Format"): eight bytes with the length of a JSON header, the header, then
the arrays in order. The library's writer needs all of them in memory at once, so this is our own.
Read next: `torch_names.py`, which finds a model's parameters in such a file.
"""

import json
import math
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from openpi_train.data.core.files import replacing, write_json
from openpi_train.interop.place import Place
from openpi_train.interop.stored_leaves import Index, Leaves, StoredLeaf, bytes_in_order, in_file
from openpi_train.runtime.exits import CheckpointError

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# The most bytes of tensors in a file, as on the Hugging Face hub.
SHARD_BYTES = 5_000_000_000
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000  # the library's own limit
# Commas and brackets of a header, about ten a tensor: what JSON takes in memory grows with them.
_MOST_HEADER_PARTS = 5_000_000
_MOST_DIMS = 32


def tensor_names(place: Place) -> Iterable[str]:
    """The names of the tensors in a folder: of one file, or from the index of several; empty if it has neither."""
    return open_model(place) if place.has(FILE) or place.has(INDEX) else ()


def open_model(place: Place) -> Leaves:
    """The tensors of the folder's `model.safetensors`, or of all the files that its index names.

    Raises CheckpointError if a file is missing, truncated, or holds other tensors than the index lists.
    """
    if place.has(FILE) or not place.has(INDEX):
        return open_file(place, FILE)
    try:
        held: dict[str, str] = json.loads(place.read(INDEX))["weight_map"]
        files = sorted(set(held.values()))
        if odd := [file for file in files if not isinstance(file, str) or "/" in file or "\0" in file]:
            raise ValueError(f"{odd[0]!r} is no name of a file in this folder")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{place}/{INDEX} is damaged ({type(error).__name__}: {error}); fetch it again"
        ) from error
    if absent := [file for file in files if not place.has(file)]:
        raise CheckpointError(
            f"{place} is incomplete: {len(absent)} of the {len(files)} files that its {INDEX} names are missing: "
            f"{', '.join(absent[:4])}; fetch them"
        )
    tensors: dict[str, StoredLeaf] = {}
    for file in files:
        found = open_file(place, file)
        if odd := sorted(set(found) ^ {name for name, where in held.items() if where == file}):
            there = "has" if odd[0] in found else "lacks"
            raise CheckpointError(
                f"{place}/{file} {there} {odd[0]}, against {INDEX} ({len(odd)} such names): these files are not of "
                "one save; fetch all of them again"
            )
        tensors.update(found)
    return tensors


def open_file(place: Place, file: str) -> Leaves:
    """The tensors of one file by name. Raises CheckpointError if it is missing, truncated, or in another format."""
    where = f"{place}/{file}"
    header, begin = _read_header(place, file, where)
    tensors, ranges = {}, []
    for name, entry in header.items():
        dtype, shape, first, last = _entry(where, name, entry)
        tensors[name] = _tensor(place, file, begin + first, shape, dtype)
        ranges.append((first, last, name))
    end = 0
    for first, last, name in sorted(ranges):
        if first != end:
            how = "overlap with those of another tensor" if first < end else f"leave {first - end} bytes before them"
            raise CheckpointError(f"{where}: the bytes of {name} {how}, against the format; fetch it again")
        end = last
    if place.local and (size := (place.local / file).stat().st_size) != begin + end:
        raise CheckpointError(f"{where} is truncated: it has {size} of {begin + end} bytes; fetch it again")
    return tensors


def write_file(path: Path, tensors: Leaves, metadata: Mapping[str, str] | None = None) -> None:
    """Write `tensors` in their order and dtypes, piece by piece.

    Raises ValueError for an unsupported dtype.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, leaf in tensors.items():
        if leaf.dtype not in _NAMES:
            raise ValueError(f"{name} is {leaf.dtype}; supported dtypes are {', '.join(map(str, _NAMES))}")
        end = offset + leaf.size_bytes
        header[name] = {"dtype": _NAMES[leaf.dtype], "shape": list(leaf.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)  # align the arrays to eight bytes
    with replacing(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for leaf in tensors.values():
            for piece in bytes_in_order(leaf):
                file.write(piece)


def write_model(folder: Path, tensors: Leaves, metadata: Mapping[str, str] | None = None) -> None:
    """Write `tensors` as `model.safetensors`, or as several files and their index if they exceed `SHARD_BYTES`."""
    parts: list[dict[str, StoredLeaf]] = [{}]
    held = 0
    for name, leaf in tensors.items():
        if parts[-1] and held + leaf.size_bytes > SHARD_BYTES:
            parts.append({})
            held = 0
        parts[-1][name] = leaf
        held += leaf.size_bytes
    if len(parts) == 1:
        write_file(folder / FILE, tensors, metadata)
        return
    names = [f"model-{at:05d}-of-{len(parts):05d}.safetensors" for at in range(1, len(parts) + 1)]
    for file, part in zip(names, parts, strict=True):
        write_file(folder / file, part, metadata)
    total = sum(leaf.size_bytes for leaf in tensors.values())
    where = {name: file for file, part in zip(names, parts, strict=True) for name in part}
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})


def _read_header(place: Place, file: str, where: str) -> tuple[dict[str, Any], int]:
    """The header without its metadata, and the offset of the first array."""
    start = place.read(file, 0, _LENGTH_BYTES)
    length = struct.unpack("<Q", start)[0] if len(start) == _LENGTH_BYTES else 0
    if not 2 <= length <= _MOST_HEADER_BYTES:
        hint = "; it is a Git LFS pointer: fetch the file itself" if start.startswith(b"version ") else ""
        raise CheckpointError(f"{where} is not a safetensors file, or its first bytes are lost{hint}")
    text = place.read(file, _LENGTH_BYTES, _LENGTH_BYTES + length)
    if len(text) < length:
        raise CheckpointError(f"{where} is truncated: its header has {len(text)} of {length} bytes; fetch it again")
    if (parts := sum(map(text.count, (b",", b"[", b"{")))) > _MOST_HEADER_PARTS:
        raise CheckpointError(f"{where}: its header has {parts:,} parts; the most are {_MOST_HEADER_PARTS:,}")
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{where}: its header is damaged ({error}); fetch it again") from error
    return header, _LENGTH_BYTES + length


def _entry(where: str, name: str, entry: Any) -> tuple[np.dtype, tuple[int, ...], int, int]:
    """A tensor's dtype, its shape, and where its bytes begin and end behind the header, as the header says."""
    try:
        dtype_name, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if not all(type(number) is int and number >= 0 for number in (*shape, first, last)):
            raise ValueError("sizes and offsets are whole numbers from 0")
        if len(shape) > _MOST_DIMS:
            raise ValueError(f"it has {len(shape)} dims; the most are {_MOST_DIMS}")
        if not isinstance(dtype_name, str):
            raise ValueError("its type is no text")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: the header's entry of {name} is damaged ({error}); fetch it again") from error
    if dtype_name not in _DTYPES:
        raise CheckpointError(f"{where}: {name} is of type {dtype_name}; supported are {', '.join(_DTYPES)}")
    dtype = _DTYPES[dtype_name]
    if last - first != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(f"{where}: {name} {shape} has {last - first} bytes in the header; fetch it again")
    return dtype, shape, first, last


def _tensor(place: Place, file: str, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> StoredLeaf:
    if place.local is not None:
        return in_file(place.local / file, dtype, shape, offset)

    def read(index: Index) -> np.ndarray:
        size = math.prod(shape) * dtype.itemsize
        content = place.read(file, offset, offset + size)
        if len(content) < size:
            raise CheckpointError(f"{place}/{file} is truncated: fetch it again")
        return np.frombuffer(content, dtype).reshape(shape)[index]

    return StoredLeaf(shape=shape, dtype=dtype, read=read)
