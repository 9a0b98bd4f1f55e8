"""One process's local saves: pieces in one file on a local disk, and a record that is written last.

    <step>/pieces.bin    the pieces, concatenated
           record.json   metadata of the save, and description, position and crc32 of every piece

A save is valid only with its record, which begins with its own crc32, and a piece only with its crc32.
Read next: `local_tier.py`, where the processes agree on the save to use.
"""

import concurrent.futures
import json
import math
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.checkpoints.pieces import Pieces, dtype_and_shape
from openpi_train.data.core.files import write_text
from openpi_train.json_object import JsonObject

_PIECES, _RECORD = "pieces.bin", "record.json"
_ALIGNMENT_BYTES = 64  # what numpy and tensorstore read fastest
_CHUNK_BYTES = 8 << 20  # checksummed and written while it is in the processor's cache
_THREADS = 4  # crc32 and file calls release the interpreter lock, so a few threads keep a fast disk busy


class DamagedError(Exception):
    """A local save is damaged or incomplete; the message says how."""


def reserve(directory: Path, described: Mapping[str, str]) -> None:
    """Create a save's folder, and reserve space for pieces of these descriptions. Raises OSError if there is none."""
    directory.mkdir(parents=True)
    with (directory / _PIECES).open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, _lay_out(described)[1])


def write(
    directory: Path,
    pieces: Pieces,
    described: Mapping[str, str],
    belongs: JsonObject,
    before_record: Callable[[], None] = lambda: None,
) -> None:
    """Write a reserved save, through to the disk. `belongs` is JSON that `read_record` gives back.

    Where `before_record` raises, the save stays without its record, which makes it valid.
    """
    offsets, _ = _lay_out(described)
    with (directory / _PIECES).open("r+b") as file, concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        writing = {name: pool.submit(_write_piece, file.fileno(), at, pieces[name]) for name, at in offsets.items()}
        checksums = {name: future.result() for name, future in writing.items()}
        os.fsync(file.fileno())
    before_record()
    body = json.dumps({**belongs, "pieces": dict(described), "crc32": checksums}, allow_nan=False)
    write_text(directory / _RECORD, f"{zlib.crc32(body.encode()):08x}\n{body}\n")


def read_record(directory: Path) -> dict[str, Any]:
    """The metadata given to `write`, with the `pieces` and their `crc32`. Raises DamagedError."""
    try:
        checksum, _, body = (directory / _RECORD).read_text(encoding="utf-8").removesuffix("\n").partition("\n")
        if f"{zlib.crc32(body.encode()):08x}" != checksum:
            raise DamagedError(f"{_RECORD} is corrupt: its crc32 is not the one that it was saved with")
        record = json.loads(body)
        size, saved = (directory / _PIECES).stat().st_size, _lay_out(record["pieces"])[1]
    except FileNotFoundError as error:
        raise DamagedError(f"{Path(error.filename).name} is missing: the save was cut off before its end") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DamagedError(f"{_RECORD} cannot be read ({error})") from error
    if size != saved:
        raise DamagedError(f"{_PIECES} is torn: it has {size} bytes and was saved with {saved}")
    return record


def read_pieces(directory: Path, record: JsonObject) -> dict[str, np.ndarray]:
    """Read all pieces of a save into memory. Raises DamagedError."""
    offsets, _ = _lay_out(record["pieces"])
    arrays = {name: np.empty(shape, dtype) for name, (dtype, shape) in _parse(record["pieces"]).items()}
    try:
        with (directory / _PIECES).open("rb") as file, concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
            reading = {name: pool.submit(_read_piece, file.fileno(), at, arrays[name]) for name, at in offsets.items()}
            checksums = {name: future.result() for name, future in reading.items()}
    except OSError as error:
        raise DamagedError(f"{_PIECES} cannot be read ({error})") from error
    for name, now in checksums.items():
        if now != record["crc32"][name]:
            saved = record["crc32"][name]
            raise DamagedError(f"{name} is corrupt: its crc32 is {now:08x} and was saved as {saved:08x}")
    return arrays


def map_pieces(directory: Path, described: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Memory-map all pieces of a save; valid even after the file was deleted."""
    offsets, _ = _lay_out(described)
    mapped = np.memmap(directory / _PIECES, dtype=np.uint8, mode="r")
    return {
        name: mapped[offsets[name] :][: _size_bytes(dtype, shape)].view(dtype).reshape(shape)
        for name, (dtype, shape) in _parse(described).items()
    }


def _lay_out(described: Mapping[str, str]) -> tuple[dict[str, int], int]:
    """The offset of each piece, and the total size, in bytes."""
    offsets, end = {}, 0
    for name, (dtype, shape) in _parse(described).items():
        offsets[name] = end
        end += math.ceil(_size_bytes(dtype, shape) / _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return offsets, end


def _parse(described: Mapping[str, str]) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    return {name: dtype_and_shape(text) for name, text in described.items()}


def _size_bytes(dtype: np.dtype, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * dtype.itemsize


def _write_piece(file: int, offset: int, piece: np.ndarray) -> int:
    """Write the piece at its offset; returns its crc32."""
    content, checksum, done = _bytes_of(np.ascontiguousarray(piece)), 0, 0
    while done < len(content):
        chunk = content[done : done + _CHUNK_BYTES]
        written = os.pwrite(file, chunk, offset + done)
        checksum = zlib.crc32(chunk[:written], checksum)
        done += written
    return checksum


def _read_piece(file: int, offset: int, piece: np.ndarray) -> int:
    """Read the piece from its offset; returns its crc32."""
    content, checksum, done = _bytes_of(piece), 0, 0
    while done < len(content):
        chunk = content[done : done + _CHUNK_BYTES]
        read = os.preadv(file, [chunk], offset + done)
        if read == 0:
            raise OSError("it ends early")
        checksum = zlib.crc32(chunk[:read], checksum)
        done += read
    return checksum


def _bytes_of(piece: np.ndarray) -> memoryview:
    return piece.reshape(-1).view(np.uint8).data
