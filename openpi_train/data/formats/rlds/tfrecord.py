"""TFRecord framing: read records with their byte offsets, and write them, without TensorFlow.

Read next: `example.py` (the content of a record), `rlds_index.py` (reads whole files).

A record is: payload length (uint64, little endian), its masked CRC32C, the payload, the payload's masked CRC32C
(tensorflow/core/lib/io/record_writer.h).
"""

import dataclasses
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import google_crc32c

_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<I")
HEADER_BYTES = _LENGTH.size + _CRC.size
FOOTER_BYTES = _CRC.size
_MASK_DELTA = 0xA282EAD8


def masked_crc(data: bytes) -> int:
    """The CRC32C of `data`, rotated right by 15 bits and shifted by a constant, as TFRecord stores it."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


@dataclasses.dataclass(frozen=True)
class Record:
    """One record of a file: its number, the offset of its payload, and the payload or a problem.

    `problem` is empty for a good record. If `lost` is True, the framing itself is damaged, so neither this record nor
    any later one can be found.
    """

    number: int
    offset: int
    payload: bytes
    problem: str = ""
    lost: bool = False


def read_records(path: Path, *, check_crc: bool = True) -> Iterator[Record]:
    """Yield the records of a file in order; a damaged one is yielded with its `problem`, without raising.

    Args:
        path: A local or mounted TFRecord file.
        check_crc: Verify the payloads' checksums. Lengths are always verified, as they locate the next record.
    """
    size = path.stat().st_size
    with open(path, "rb", buffering=1 << 20) as file:
        offset, number = 0, 0
        while offset < size:
            header = file.read(HEADER_BYTES)
            problem = _header_problem(header, remaining=size - offset)
            if problem:
                yield Record(number, offset, b"", f"{problem} at byte {offset} of {size}", lost=True)
                return
            (length,) = _LENGTH.unpack_from(header)
            payload = file.read(length)
            footer = file.read(FOOTER_BYTES)
            damaged = check_crc and masked_crc(payload) != _CRC.unpack(footer)[0]
            yield Record(number, offset + HEADER_BYTES, payload, "checksum does not match its bytes" if damaged else "")
            offset += HEADER_BYTES + length + FOOTER_BYTES
            number += 1


def write_record(file: BinaryIO, payload: bytes) -> None:
    """Append one record to an open binary file."""
    length = _LENGTH.pack(len(payload))
    file.write(length + _CRC.pack(masked_crc(length)))
    file.write(payload)
    file.write(_CRC.pack(masked_crc(payload)))


def _header_problem(header: bytes, remaining: int) -> str:
    if len(header) < HEADER_BYTES:
        return "the file is truncated in a record's header"
    if masked_crc(header[: _LENGTH.size]) != _CRC.unpack_from(header, _LENGTH.size)[0]:
        return "a record's length does not match its checksum"
    (length,) = _LENGTH.unpack_from(header)
    if HEADER_BYTES + length + FOOTER_BYTES > remaining:
        return f"the file is truncated: a record needs {length} bytes"
    return ""
