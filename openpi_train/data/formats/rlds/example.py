"""Parser of serialized `tf.train.Example` messages that also gives the byte offsets of their values.

Read next: `rlds_index.py` (makes an index of images from the offsets).

The proto classes give values but not byte offsets, and they would need TensorFlow or tensorflow-datasets in every
reading process. The messages (tensorflow/core/example/example.proto, feature.proto):

    Example.features = 1 -> Features.feature = 1 (map entries: key = 1, value = 2)
    Feature: one of bytes_list = 1, float_list = 2, int64_list = 3; each holds a repeated value = 1
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_KINDS = {1: "bytes", 2: "float", 3: "int"}

Span = tuple[int, int]  # start and end in the record's payload


@dataclasses.dataclass(frozen=True)
class Feature:
    """One feature of a record: its kind ("bytes", "float", "int" or "empty") and the spans of its values.

    For "bytes" every span is one value. For numbers a span is a run of packed values.
    """

    kind: str
    payload: bytes
    spans: tuple[Span, ...]

    def values(self) -> list[bytes]:
        """The byte strings of a "bytes" feature."""
        return [self.payload[start:end] for start, end in self.spans]

    def numbers(self) -> np.ndarray:
        """The numbers, flat: float32 for a "float" feature, int64 for an "int" feature."""
        packed = b"".join(self.values())
        if self.kind == "float":
            return np.frombuffer(packed, "<f4")
        return _decode_varints(np.frombuffer(packed, np.uint8))


def read_example(payload: bytes) -> dict[str, Feature]:
    """All features of a serialized Example, by name.

    Raises ValueError if the bytes are not an Example.
    """
    features: dict[str, Feature] = {}
    for number, _, start, end in _fields(payload, 0, len(payload)):
        if number != 1:
            continue
        for entry, _, entry_start, entry_end in _fields(payload, start, end):
            if entry == 1:
                name, feature = _map_entry(payload, entry_start, entry_end)
                features[name] = feature
    return features


def _map_entry(payload: bytes, start: int, end: int) -> tuple[str, Feature]:
    name, feature = "", Feature("empty", payload, ())
    for number, _, field_start, field_end in _fields(payload, start, end):
        if number == 1:
            name = payload[field_start:field_end].decode()
        elif number == 2:
            feature = _feature(payload, field_start, field_end)
    return name, feature


def _feature(payload: bytes, start: int, end: int) -> Feature:
    lists = list(_fields(payload, start, end))
    if not lists:
        return Feature("empty", payload, ())
    if len(lists) > 1 or lists[0][0] not in _KINDS:
        raise ValueError("a feature of the record is not a list of bytes, floats or integers")
    number, _, list_start, list_end = lists[0]
    spans = tuple((first, last) for item, _, first, last in _fields(payload, list_start, list_end) if item == 1)
    return Feature(_KINDS[number], payload, spans)


def _fields(payload: bytes, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Field number, wire type, and the span of the value (without its length prefix) of each field of a message."""
    while start < end:
        tag, start = _varint(payload, start, end)
        wire_type = tag & 7
        if wire_type == _BYTES:
            length, start = _varint(payload, start, end)
            stop = start + length
        elif wire_type == _VARINT:
            _, stop = _varint(payload, start, end)
        elif wire_type in (_FIXED32, _FIXED64):
            stop = start + (4 if wire_type == _FIXED32 else 8)
        else:
            raise ValueError(f"wire type {wire_type} does not occur in a tf.train.Example")
        if stop > end:
            raise ValueError("a field of the record runs past its message")
        yield tag >> 3, wire_type, start, stop
        start = stop


def _varint(payload: bytes, start: int, end: int) -> tuple[int, int]:
    value, shift = 0, 0
    while start < end and shift < 70:
        byte = payload[start]
        start += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, start
        shift += 7
    raise ValueError("a number of the record is cut off or longer than ten bytes")


def _decode_varints(raw: np.ndarray) -> np.ndarray:
    """The int64 values of a run of varints (seven bits per byte, lowest first, top bit set if more follow)."""
    ends = np.flatnonzero(raw < 0x80)
    if len(ends) == len(raw):
        return raw.astype(np.int64)
    if raw[-1] >= 0x80:
        raise ValueError("a list of integers in the record is cut off")
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if lengths.max() > 10:
        raise ValueError("an integer of the record is longer than ten bytes")
    values = np.zeros(len(ends), np.uint64)
    for place in range(lengths.max()):
        longer = lengths > place
        values[longer] |= (raw[starts[longer] + place].astype(np.uint64) & np.uint64(0x7F)) << np.uint64(7 * place)
    return values.view(np.int64)
