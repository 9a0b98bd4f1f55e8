"""Dictionaries of arrays as bytes, in openpi's framing: msgpack, with maps that stand for numpy's arrays and scalars.

    array    {b"__ndarray__": True, b"data": bytes, b"dtype": "<f4", b"shape": [2, 3]}
    scalar   {b"__npgeneric__": True, b"data": 1.5, b"dtype": "<f4"}

Nothing that is read can run: types are numbers, truth values and text alone, never objects. What comes is taken for
hostile until it is checked; decoded arrays are read-only views of it. Read next: `record.py`, `serve/server.py`.
"""

import itertools
import math
import re
from typing import Any

import msgpack
import numpy as np

_NUMBERS = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248])")
_TYPES = re.compile(rf"{_NUMBERS.pattern}|[<>|=]?[SU][1-9][0-9]{{0,5}}")
_MAX_DIMS = 8
# Lists and maps of a message: one byte each on the wire, a hundred in memory, and all other requests wait for them.
_MAX_PARTS = 100_000


class WireError(ValueError):
    """Bytes that are no message of this framing."""


def encode(message: Any) -> bytes:
    """The message as bytes. Raises TypeError for what the framing has no form for."""
    packed = msgpack.packb(message, default=_stand_in)
    assert packed is not None
    return packed


def decode(data: bytes, max_parts: int = _MAX_PARTS) -> Any:
    """The message that the bytes hold. Raises WireError, also where it has more than `max_parts` lists and maps."""
    parts = itertools.count(1)

    def counted(part: Any) -> Any:
        if next(parts) > max_parts:
            raise WireError(f"the message has more than {max_parts} lists and maps; send arrays")
        return part

    try:
        return msgpack.unpackb(
            data,
            object_hook=lambda value: _from_stand_in(counted(value)),
            list_hook=counted,
            max_array_len=min(max_parts, len(data)),
        )
    except WireError:
        raise
    except (ValueError, TypeError, ArithmeticError, RecursionError, msgpack.UnpackException) as error:
        said = str(error) or type(error).__name__
        raise WireError(f"the message is no msgpack as openpi's clients send it: {said[:200]}") from error


def _stand_in(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        if not _TYPES.fullmatch(value.dtype.str):
            raise TypeError(f"arrays of {value.dtype} have no form on the wire; send numbers, truth values or text")
        if isinstance(value, np.ndarray):
            shape = list(value.shape)
            return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": shape}
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    raise TypeError(f"a {type(value).__name__} has no form on the wire")


def _from_stand_in(value: dict[Any, Any]) -> Any:
    if b"__ndarray__" in value:
        return _array(value)
    if b"__npgeneric__" in value:
        return _scalar(value)
    return value


def _array(value: dict[Any, Any]) -> np.ndarray:
    dtype, data, shape = _dtype(value), value.get(b"data"), value.get(b"shape")
    if not (isinstance(data, bytes) and isinstance(shape, list) and len(shape) <= _MAX_DIMS) or not all(
        type(size) is int and size >= 0 for size in shape
    ):
        raise WireError(
            f"an array needs bytes and a shape of at most {_MAX_DIMS} sizes; its shape is {str(shape)[:80]}"
        )
    if math.prod(shape) * dtype.itemsize != len(data):
        raise WireError(f"an array of {dtype} {shape} has {math.prod(shape) * dtype.itemsize} bytes, not {len(data)}")
    return np.frombuffer(data, dtype).reshape(shape) if data else np.zeros(shape, dtype)


def _scalar(value: dict[Any, Any]) -> np.generic:
    data = value.get(b"data")
    if not isinstance(data, bool | int | float):
        raise WireError(f"a scalar is a number, not a {type(data).__name__}")
    return _dtype(value, _NUMBERS).type(data)


def _dtype(value: dict[Any, Any], allowed: re.Pattern[str] = _TYPES) -> np.dtype:
    name = value.get(b"dtype")
    if not isinstance(name, str) or not allowed.fullmatch(name):
        raise WireError(f"arrays of {str(name)[:80]!r} are not read; allowed: numbers, truth values and text")
    return np.dtype(name)
