"""Numbers in a parquet column, nested or not, as an array of which every row is checked. Read next: `episodes.py`."""

import math
from typing import Any

import numpy as np

from openpi_train.data.formats.lerobot.lerobot_metadata import require


def numbers(column: Any, dtype: str, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """A column as [rows, *shape], and how many numbers each row holds, int64 [rows].

    A row that does not hold `prod(shape)` numbers is zero. Its count is -1 if it is null or holds a null, or if it is a
    list of lists of several lengths. All numbers of a column lie one after the other, whatever the lengths of its
    lists: unless each is looked at, the numbers of one row become those of the next.

    Raises ValueError if the column holds something else than numbers, or numbers that `dtype` cannot hold.
    """
    pa, compute = require("pyarrow"), require("pyarrow.compute")
    num_rows, array = len(column), column.combine_chunks()
    while isinstance(array, pa.ExtensionArray):
        array = array.storage
    sizes, kind = _sizes(array, shape), array.type
    counts = np.full(num_rows, math.prod(sizes), np.int64)
    # The rows that are left; each has `entries` entries of `array`.
    rows, entries = np.arange(num_rows), 1

    def drop(wrong: np.ndarray, found: np.ndarray | int) -> None:
        """Leave out the rows of these entries, which hold `found` numbers."""
        nonlocal array, rows
        counts[rows[wrong // entries]] = found
        sound = np.ones(len(rows), bool)
        sound[wrong // entries] = False
        array, rows = array.filter(pa.array(np.repeat(sound, entries))), rows[sound]

    for size in sizes:
        lengths = compute.list_value_length(array).fill_null(-1).to_numpy(zero_copy_only=False)
        if (wrong := np.flatnonzero(lengths != size)).size:
            drop(wrong, lengths[wrong] if len(sizes) == 1 else -1)
        array, entries = array.flatten(), entries * size
    if array.null_count:
        drop(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)), -1)
    if not (pa.types.is_null(array.type) or _is_number(array.type)):
        raise ValueError(f"it holds {kind}, not numbers")
    if math.prod(sizes) != math.prod(shape):
        return np.zeros((num_rows, *shape), dtype), counts
    found = _cast(array.to_numpy(zero_copy_only=False), np.dtype(dtype)).reshape(-1, *shape)
    if len(rows) == num_rows:
        return found, counts
    values = np.zeros((num_rows, *shape), dtype)
    values[rows] = found
    return values, counts


def amount(count: int) -> str:
    """What a row holds, by its count."""
    return "null, or lists of several lengths" if count < 0 else f"{count} number{'s' if count != 1 else ''}"


def _sizes(array: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The length of the lists at each level. Raises ValueError if the nesting is not that of the shape.

    The shape may also be written as one list of all numbers, or with further dims of 1.
    """
    kind, depth = array.type, 0
    while hasattr(kind, "value_type") and not require("pyarrow").types.is_dictionary(kind):
        kind, depth = kind.value_type, depth + 1
    if depth in (0, len(shape)):
        return shape[:depth]
    if depth == 1:
        return (math.prod(shape),)
    first = array.drop_null()[:1].to_pylist() or [[]]
    try:
        found = np.shape(np.array(first[0]))
    except ValueError:  # lists of several lengths
        found = ()
    if len(found) != depth or [size for size in found if size != 1] != [size for size in shape if size != 1]:
        raise ValueError(f"it holds {array.type} ({list(found)} in the first row), not {list(shape)} numbers per step")
    return found


def _is_number(kind: object) -> bool:
    types = require("pyarrow").types
    return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)


def _cast(found: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The numbers in another type. Raises ValueError if it is one of whole numbers that cannot hold them."""
    if found.dtype == dtype or dtype.kind == "f":
        return found.astype(dtype, copy=False)
    with np.errstate(invalid="ignore"):
        cast = found.astype(dtype)
    if not np.array_equal(cast, found):
        raise ValueError(f"it holds {found.dtype} numbers that {dtype} cannot hold")
    return cast
