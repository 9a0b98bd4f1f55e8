"""A checkpoint as every format gives it: names to leaves that are read in parts, so that each device reads its own.

Read next: `accounting.py` (which names there must be), `formats.py` (who gives them).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredLeaf:
    """An array that lies somewhere: `read(index)` gives the part of it that `index` (one slice per dim) names.

    `chunk` is the shape of the smallest parts that can be read; None: any part costs no more than itself.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[Index], np.ndarray]
    chunk: tuple[int, ...] | None = None

    def whole(self) -> np.ndarray:
        """All of it, on this host."""
        return self.read(tuple(slice(0, size) for size in self.shape))

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> "StoredLeaf":
        """The leaf with `function`, which keeps the shape, applied to what is read."""
        dtype = function(np.zeros(0, self.dtype)).dtype
        return dataclasses.replace(self, dtype=dtype, read=lambda index: function(self.read(index)))

    def cast(self, dtype: Any) -> "StoredLeaf":
        """The leaf in another type, rounded where it is read."""
        return self if self.dtype == dtype else self.map(lambda part: part.astype(dtype))


def in_memory(array: Any) -> StoredLeaf:
    """An array of this host as a leaf."""
    array = np.asarray(array)
    return StoredLeaf(shape=array.shape, dtype=array.dtype, read=lambda index: np.asarray(array[index]))


Leaves = Mapping[str, StoredLeaf]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
    """An opened checkpoint. Nothing but names, shapes and types has been read.

    `params` are by published name (`ModelConfig.public_name`); names that the format cannot translate stay as they
    are, for `accounting.py` to find. `train_state` is by openpi's names (`openpi_state.py`), None where there is none.
    `norm_stats` holds what each `norm_stats.json` says, by asset id; `experiment` the JSON of a run of ours.
    """

    where: str
    format: str
    params: Leaves
    train_state: Leaves | None = None
    norm_stats: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    experiment: Mapping[str, Any] | None = None


def place(leaf: StoredLeaf, dtype: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """The leaf on the devices, cast where it is placed. Each process reads only what its own devices hold, once.

    Where a chunk holds parts of several devices, these are read together and cut on the host. Every process calls it.
    """
    indices = sharding.addressable_devices_indices_map(leaf.shape).values()
    parts = {_bounds(index or (), leaf.shape) for index in indices}
    held: dict[_Bounds, np.ndarray] = {}
    if len(parts) > 1 and any(_is_cut(part, leaf.chunk or ()) for part in parts):
        box = tuple((min(begin for begin, _ in dim), max(end for _, end in dim)) for dim in zip(*parts, strict=True))
        together = leaf.read(_slices(box))
        for part in parts:
            inside = [(begin - first, end - first) for (begin, end), (first, _) in zip(part, box, strict=True)]
            held[part] = together[_slices(inside)].astype(dtype)

    def read(index: Index | None) -> np.ndarray:
        part = _bounds(index or (), leaf.shape)
        if part not in held:
            held[part] = leaf.read(_slices(part)).astype(dtype, copy=False)
        return held[part]

    return jax.make_array_from_callback(leaf.shape, sharding, read)


_Bounds = tuple[tuple[int, int], ...]


def _bounds(index: Index, shape: tuple[int, ...]) -> _Bounds:
    full = (*index, *(slice(None) for _ in shape[len(index) :]))
    return tuple((one.indices(size)[0], one.indices(size)[1]) for one, size in zip(full, shape, strict=True))


def _slices(bounds: Sequence[tuple[int, int]]) -> Index:
    return tuple(slice(begin, end) for begin, end in bounds)


def _is_cut(part: _Bounds, chunk: tuple[int, ...]) -> bool:
    """Whether reading the part means reading more, which other parts may need too."""
    return any(end - begin < size for (begin, end), size in zip(part, chunk, strict=False))
