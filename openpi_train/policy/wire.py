"""Serialization of dictionaries of arrays in openpi's format: msgpack, with maps for numpy arrays and scalars.

    array    {b"__ndarray__": True, b"data": bytes, b"dtype": "<f4", b"shape": [2, 3]}
    scalar   {b"__npgeneric__": True, b"data": 1.5, b"dtype": "<f4"}

Decoding never executes code: dtypes are limited to numbers, booleans and text, never objects. Messages are untrusted.
So they are parsed here and not with msgpack's reader, which builds maps of millions of keys before they can be refused,
holds the GIL meanwhile, and copies all arrays. Here lists and maps are counted before they are built, other threads
may run between two values, and arrays and bytes are read-only views of the message.
Read next: `record.py`, `serve/server.py`.
"""

import dataclasses
import math
import re
import struct
from typing import Any

import msgpack
import numpy as np

_NUMBERS = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248])")
_TYPES = re.compile(rf"{_NUMBERS.pattern}|[<>|=]?[SU][1-9][0-9]{{0,5}}")
_MAX_DIMS = 8
_MAX_KEY_BYTES = 256

# msgpack's type bytes; those of small numbers, lists, maps and texts are in `_Reader.value`.
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_FORMS = {0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"}
_FORMS |= {0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
_BYTES_SIZES = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I"}
_TEXT_SIZES = {0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
_LIST_SIZES = {0xDC: ">H", 0xDD: ">I"}
_MAP_SIZES = {0xDE: ">H", 0xDF: ">I"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounds:
    """Limits of a message: values in all its lists and maps, bytes in all its texts, and nesting depth."""

    # Each takes one byte or more in the message, up to a hundred in memory, and a microsecond to read.
    items: int = 10_000
    # Python may use four bytes for each.
    text_bytes: int = 1 << 18
    depth: int = 32


class WireError(ValueError):
    """Bytes that are not a valid message of this format."""


class ServerError(RuntimeError):
    """A server's answer in text: what was wrong with the request."""


def encode(message: object) -> bytes:
    """Encode a message as bytes. Raises TypeError for types that the format does not support."""
    packed = msgpack.packb(message, default=_stand_in)
    assert packed is not None
    return packed


def decode(data: bytes | str, bounds: Bounds = Bounds()) -> Any:
    """Decode a message. Raises WireError if it is invalid or exceeds `bounds`; ServerError, with the text, if it is a
    text, which is how a server says what was wrong with a request."""
    if isinstance(data, str):
        raise ServerError(f"the server refused the request: {data}")
    reader = _Reader(data, bounds)
    try:
        message = reader.value()
    except WireError:
        raise
    except (ValueError, TypeError, ArithmeticError) as error:
        raise WireError(f"the message is not msgpack in openpi's format: {str(error)[:200]}") from error
    reader.finish()
    return message


class _Reader:
    """Reads a message value by value, and counts the announced items of a list or map before it is built."""

    def __init__(self, data: bytes, bounds: Bounds):
        self._data, self._position, self._bounds = memoryview(data), 0, bounds
        self._items = self._text_bytes = 0

    def value(self, depth: int = 0) -> Any:
        """The next value; bytes are views of the message."""
        code = self._take(1)[0]
        if code < 0x80:
            return code
        if code < 0x90:
            return self._map(code & 0x0F, depth)
        if code < 0xA0:
            return self._list(code & 0x0F, depth)
        if code < 0xC0:
            return self._text(code & 0x1F)
        if code >= 0xE0:
            return code - 0x100
        if code in _CONSTANTS:
            return _CONSTANTS[code]
        if code in _FORMS:
            return self._number(_FORMS[code])
        if code in _BYTES_SIZES:
            return self._take(self._number(_BYTES_SIZES[code]))
        if code in _TEXT_SIZES:
            return self._text(self._number(_TEXT_SIZES[code]))
        if code in _LIST_SIZES:
            return self._list(self._number(_LIST_SIZES[code]), depth)
        if code in _MAP_SIZES:
            return self._map(self._number(_MAP_SIZES[code]), depth)
        raise WireError(f"the message is not msgpack in openpi's format: no value begins with {code:#x}")

    def finish(self) -> None:
        """Raise WireError if any bytes are left."""
        if left := len(self._data) - self._position:
            raise WireError(f"the message is not msgpack in openpi's format: {left} bytes follow its end (is it text?)")

    def _take(self, size: int) -> memoryview:
        end = self._position + size
        if end > len(self._data):
            raise WireError(
                f"the message is not msgpack in openpi's format: it is cut off, {end - len(self._data)} bytes "
                "are missing"
            )
        taken = self._data[self._position : end]
        self._position = end
        return taken

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _text(self, size: int) -> str:
        self._text_bytes += size
        if self._text_bytes > self._bounds.text_bytes:
            raise WireError(f"the message has more than {self._bounds.text_bytes} bytes of text")
        return str(self._take(size), "utf-8")

    def _enter(self, items: int, depth: int) -> None:
        """Check a list or map before it is built: count its announced items, and check its depth."""
        self._items += items
        if self._items > self._bounds.items:
            raise WireError(f"the message has more than {self._bounds.items} values in lists and maps; send arrays")
        if depth >= self._bounds.depth:
            raise WireError(f"the message has lists and maps more than {self._bounds.depth} deep")

    def _list(self, size: int, depth: int) -> list[Any]:
        self._enter(size, depth)
        return [self.value(depth + 1) for _ in range(size)]

    def _map(self, size: int, depth: int) -> Any:
        self._enter(2 * size, depth)
        found: dict[str | bytes, Any] = {}
        for _ in range(size):
            key = self.value(depth + 1)
            if isinstance(key, memoryview) and len(key) <= _MAX_KEY_BYTES:
                key = bytes(key)
            if not isinstance(key, str | bytes):
                raise WireError(
                    f"a {type(key).__name__} is not a key; keys are text, or at most {_MAX_KEY_BYTES} bytes"
                )
            found[key] = self.value(depth + 1)
        if b"__ndarray__" in found:
            return array(found)
        if b"__npgeneric__" in found:
            return _scalar(found)
        return found


def _stand_in(value: object) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        if not _TYPES.fullmatch(value.dtype.str):
            raise TypeError(f"arrays of {value.dtype} cannot be sent; send numbers, booleans or text")
        if isinstance(value, np.ndarray):
            shape = list(value.shape)
            return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": shape}
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    raise TypeError(f"a {type(value).__name__} cannot be sent")


def array(value: dict[Any, Any]) -> np.ndarray:
    """The array of a map with `__ndarray__`, as `decode` has found it. Raises WireError."""
    dtype, data, shape = _dtype(value), value.get(b"data"), value.get(b"shape")
    if not (isinstance(data, memoryview) and isinstance(shape, list) and len(shape) <= _MAX_DIMS) or not all(
        type(size) is int and size >= 0 for size in shape
    ):
        raise WireError(
            f"an array needs bytes and a shape of at most {_MAX_DIMS} sizes from 0 on; its shape is {_brief(shape)}"
        )
    if math.prod(shape) * dtype.itemsize != len(data):
        raise WireError(f"an array of {dtype} {shape} has {math.prod(shape) * dtype.itemsize} bytes, not {len(data)}")
    return np.frombuffer(data, dtype).reshape(shape) if data else np.zeros(shape, dtype)


def _scalar(value: dict[Any, Any]) -> np.generic:
    data = value.get(b"data")
    if not isinstance(data, bool | int | float):
        raise WireError(f"a scalar must be a number, not a {type(data).__name__}")
    return _dtype(value, _NUMBERS).type(data)


def _dtype(value: dict[Any, Any], allowed: re.Pattern[str] = _TYPES) -> np.dtype:
    name = value.get(b"dtype")
    if not isinstance(name, str) or not allowed.fullmatch(name):
        raise WireError(f"arrays of {_brief(name)} are not read; allowed: numbers, booleans and text")
    return np.dtype(name)


def _brief(value: object) -> str:
    """A short text of a value for an error message, without the unchecked contents of arrays and bytes."""
    if isinstance(value, str):
        return repr(value[:80])
    if isinstance(value, list) and all(isinstance(one, int | float | str | None) for one in value[: _MAX_DIMS + 1]):
        return repr(value[: _MAX_DIMS + 1])[:80]
    return f"a {type(value).__name__}"
