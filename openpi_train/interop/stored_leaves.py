"""Leaves of an opened checkpoint in any format, which can be read in parts, so that each device reads its own.

Read next: `parameter_matching.py` (checks their names), `checkpoint_formats.py` (opens checkpoints).
"""

import contextlib
import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.typing import DTypeLike

from openpi_train.interop.place import Place
from openpi_train.interop.robot_actions import ActionDims
from openpi_train.robots.robot import Robot

Index = tuple[slice, ...]
Piece = tuple[Index, np.ndarray]
Order = Literal["C", "F"]
# Leaves are read and written in pieces of this size, so that a host need not hold a whole one, of up to gigabytes.
PIECE_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredLeaf:
    """A stored array: `read(index)` returns the part given by `index` (one slice per dim).

    `chunk` is the shape of the smallest parts that can be read; None: any part can be read on its own. `stream` reads
    a part as pieces, in the order that suits the storage; None: any order does.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[Index], np.ndarray]
    chunk: tuple[int, ...] | None = None
    stream: Callable[[Index], Iterator[Piece]] | None = None

    @classmethod
    def streamed(
        cls,
        shape: tuple[int, ...],
        dtype: np.dtype,
        chunk: tuple[int, ...] | None,
        stream: Callable[[Index], Iterator[Piece]],
    ) -> "StoredLeaf":
        """A leaf whose parts are assembled from the pieces of `stream`."""

        def read(index: Index) -> np.ndarray:
            return assembled(stream(index), index, dtype)

        return cls(shape=shape, dtype=dtype, read=read, chunk=chunk, stream=stream)

    @property
    def size_bytes(self) -> int:
        """Size of the leaf in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def everything(self) -> Index:
        """The index of the whole leaf."""
        return tuple(slice(0, size) for size in self.shape)

    def whole(self) -> np.ndarray:
        """The whole array, on this host."""
        return self.read(self.everything)

    def pieces(self, index: Index | None = None) -> Iterator[Piece]:
        """The part `index` (None: the whole leaf) as small pieces, each with its index."""
        index = self.everything if index is None else index
        if self.stream is not None:
            return self.stream(index)
        return ((where, self.read(where)) for where in blocks(index, self.dtype.itemsize))

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> "StoredLeaf":
        """The leaf with `function`, which must keep shapes, applied when it is read."""
        dtype, stream = function(np.zeros(0, self.dtype)).dtype, self.stream
        return dataclasses.replace(
            self,
            dtype=dtype,
            read=lambda index: function(self.read(index)),
            stream=stream and (lambda index: ((where, function(piece)) for where, piece in stream(index))),
        )

    def cast(self, dtype: DTypeLike) -> "StoredLeaf":
        """The leaf in another dtype, cast when it is read."""
        return self if self.dtype == dtype else self.map(lambda part: part.astype(dtype))


def blocks(index: Index, itemsize: int) -> Iterator[Index]:
    """`index` split along its first dims into parts of at most `PIECE_BYTES`, in memory order."""
    sizes = [one.stop - one.start for one in index]
    axis = next((axis for axis, size in enumerate(sizes) if size > 1), None)
    if axis is None or math.prod(sizes) * itemsize <= PIECE_BYTES:
        yield index
        return
    rows = max(1, PIECE_BYTES // (math.prod(sizes[axis + 1 :]) * itemsize))
    for begin in range(index[axis].start, index[axis].stop, rows):
        part = slice(begin, min(begin + rows, index[axis].stop))
        cut = (*index[:axis], part, *index[axis + 1 :])
        yield from (blocks(cut, itemsize) if rows == 1 else (cut,))


def bytes_in_order(leaf: StoredLeaf) -> Iterator[memoryview]:
    """The bytes of the whole leaf in memory order, piece by piece."""
    for where in blocks(leaf.everything, leaf.dtype.itemsize):
        yield np.ascontiguousarray(leaf.read(where)).reshape(-1).view(np.uint8).data


def inside(index: Index, box: Index) -> Index:
    """The position of the part `index` in an array that holds the part `box`."""
    return tuple(slice(one.start - all_.start, one.stop - all_.start) for one, all_ in zip(index, box, strict=True))


def common(one: Index, other: Index) -> Index | None:
    """The intersection of both parts; None if it is empty."""
    both = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True))
    return both if all(dim.start < dim.stop for dim in both) else None


def assembled(pieces: Iterator[Piece], index: Index, dtype: DTypeLike) -> np.ndarray:
    """The part `index` assembled from its pieces, each cast to `dtype`."""
    part = np.empty([one.stop - one.start for one in index], dtype)
    for where, piece in pieces:
        part[inside(where, index)] = piece
    return part


def same_values(one: StoredLeaf, other: StoredLeaf) -> bool:
    """Whether both have the same shape and values; they are read in pieces."""
    if one.shape != other.shape:
        return False
    return all(np.array_equal(one.read(part), other.read(part)) for part in blocks(one.everything, one.dtype.itemsize))


def in_memory(array: object) -> StoredLeaf:
    """An array of this host as a leaf."""
    array = np.asarray(array)
    return StoredLeaf(shape=array.shape, dtype=array.dtype, read=lambda index: np.asarray(array[index]))


def in_file(file: object, dtype: np.dtype, shape: tuple[int, ...], offset: int = 0, order: Order = "C") -> StoredLeaf:
    """An array in a file (open, or given by its path) as a leaf."""
    return StoredLeaf(shape=shape, dtype=dtype, read=lambda index: mapped(file, dtype, shape, offset, order)[index])


def mapped(
    file: Any,
    dtype: np.dtype,
    shape: tuple[int, ...],
    offset: int = 0,
    order: Order = "C",
    mode: Literal["r", "r+"] = "r",
) -> np.ndarray:
    """An array in a file, memory-mapped. Release it soon: mapped pages count as this process's memory."""
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return np.empty(shape, dtype)  # an empty array cannot be mapped
    plain = np.memmap(file, np.uint8, mode, offset, (size,)).view(np.ndarray)
    return plain.view(dtype).reshape(shape, order=order)


@contextlib.contextmanager
def at_hand(leaf: StoredLeaf, folder: Path | None) -> Iterator[StoredLeaf]:
    """The leaf in a form in which any part can be read on its own; if necessary, copied to a file in `folder`.

    `folder` None is TMPDIR. The file is anonymous: it is gone however this process ends.
    """
    if leaf.chunk is None and leaf.stream is None:
        yield leaf
    elif leaf.size_bytes <= PIECE_BYTES:
        yield in_memory(assembled(leaf.pieces(), leaf.everything, leaf.dtype))
    else:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.truncate(leaf.size_bytes)

            laid_out = in_file(file, leaf.dtype, leaf.shape)
            for where, piece in leaf.pieces():
                mapped(file, leaf.dtype, leaf.shape, mode="r+")[where] = piece
            yield laid_out


Leaves = Mapping[str, StoredLeaf]
# Writes what was checked into a directory that does not exist yet.
Writer = Callable[[Path], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
    """An opened checkpoint. Only names, shapes and types have been read.

    `params` are by published name (`ParamRules.public_name`); names that the format cannot translate are unchanged,
    for `parameter_matching.py` to report. `train_state` is by openpi's names (`openpi.py`), None if there is none.
    `norm_stats` has the content of each `norm_stats.json`, by asset id. For our own runs, `experiment` is the JSON of
    the experiment, `tokenizer` the tokenizer's fingerprint, and `token_files` the folder of its files, if there;
    `text_length` is the number of text tokens of its longest rows, None where nothing tells. `trained_with` are fields
    of an experiment beside its model's, by dotted name, of other trainers' policies that say how they were trained, and
    `action_dims` which of their actions are relative to the state. `robots` are those of the norm stats, by asset id,
    where they are known beside `experiment`.
    """

    where: str
    format: str
    params: Leaves
    train_state: Leaves | None = None
    norm_stats: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    experiment: Mapping[str, Any] | None = None
    tokenizer: str | None = None
    token_files: Place | None = None
    text_length: int | None = None
    trained_with: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    action_dims: ActionDims | None = None
    robots: Mapping[str, Robot] = dataclasses.field(default_factory=dict)


def place(leaf: StoredLeaf, dtype: DTypeLike, sharding: jax.sharding.Sharding) -> jax.Array:
    """Place the leaf on the devices, cast to `dtype`. Each process reads only what its own devices hold, once.

    Parts of several devices in the same chunk are read together and split on the host. Every process must call it.
    """
    indices = sharding.addressable_devices_indices_map(leaf.shape).values()
    parts = {_bounds(index or (), leaf.shape) for index in indices}
    held: dict[_Bounds, np.ndarray] = {}
    if len(parts) > 1 and any(_is_cut(part, leaf.chunk or ()) for part in parts):
        box = tuple((min(begin for begin, _ in dim), max(end for _, end in dim)) for dim in zip(*parts, strict=True))
        held = {part: np.empty([end - begin for begin, end in part], dtype) for part in parts}
        for where, piece in leaf.pieces(_slices(box)):
            for part, values in held.items():
                if both := common(where, _slices(part)):
                    values[inside(both, _slices(part))] = piece[inside(both, where)]

    def read(index: Index | None) -> np.ndarray:
        part = _bounds(index or (), leaf.shape)
        if part not in held:
            held[part] = assembled(leaf.pieces(_slices(part)), _slices(part), dtype)
        return held[part]

    return jax.make_array_from_callback(leaf.shape, sharding, read)


_Bounds = tuple[tuple[int, int], ...]


def _bounds(index: Index, shape: tuple[int, ...]) -> _Bounds:
    full = (*index, *(slice(None) for _ in shape[len(index) :]))
    return tuple((one.indices(size)[0], one.indices(size)[1]) for one, size in zip(full, shape, strict=True))


def _slices(bounds: Sequence[tuple[int, int]]) -> Index:
    return tuple(slice(begin, end) for begin, end in bounds)


def _is_cut(part: _Bounds, chunk: tuple[int, ...]) -> bool:
    """Whether reading the part also reads data outside of it, which other parts may need."""
    return any(end - begin < size for (begin, end), size in zip(part, chunk, strict=False))
