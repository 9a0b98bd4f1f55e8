"""Reader and writer of one item (a tree of arrays) of an Orbax checkpoint. Read next: `openpi.py`.

All readers use it: start weights, `convert`, policies, resumed runs. Runs write their items with all processes
(`checkpoints/copy_out.py`). Orbax's own restore reads a whole tree at once and synchronises all processes.
An item's layout is public: the JSON `_METADATA` names its leaves, and each leaf is a zarr array, all in one OCDBT
store or each in its own folder.
"""

import contextlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.data.core.files import write_json
from openpi_train.interop import big_chunk
from openpi_train.interop.place import Place
from openpi_train.interop.stored_leaves import PIECE_BYTES, Index, Leaves, Piece, StoredLeaf, at_hand, blocks, in_memory
from openpi_train.runtime.exits import CheckpointError, kind_for

METADATA = "_METADATA"
# Chunks are always decoded as a whole: as many at a time as have this many bytes. Chunks larger than a piece are read
# with `big_chunk.py`.
_CHUNKS_BYTES = 4 * PIECE_BYTES
_INDEX_POOL, _INDEX_BYTES = "cache_pool#index", 64 << 20


def open_item(item: Place) -> Leaves:
    """The item's leaves by path ("/" between keys). Reads only their metadata. Raises CheckpointError."""
    import tensorstore

    paths, driver = _described(item)
    base: dict[str, Any] = {}
    if item.has("manifest.ocdbt"):
        base = {"driver": "ocdbt", "base": item.kvstore, "cache_pool": _INDEX_POOL}

    def spec(path: str) -> dict[str, Any]:
        key = f"{path.replace('/', '.')}/"
        return {"driver": driver, "kvstore": {**base, "path": key} if base else f"{item.kvstore}{key}"}

    # Chunks are not cached, since the cache would grow to the whole item. The store's index is: else every leaf reads
    # and decodes it anew, and it has an entry for each process's part of each leaf.
    context = tensorstore.Context(
        {"cache_pool": {"total_bytes_limit": 0}, _INDEX_POOL: {"total_bytes_limit": _INDEX_BYTES}}
    )
    opening = {path: tensorstore.open(spec(path), context=context, open=True, read=True) for path in paths}
    return {path: _leaf(item, path, pending) for path, pending in opening.items()}


def save_item(item: Path, tree: Mapping[str, object]) -> None:
    """Write the tree of leaves (or arrays of this host) as Orbax does, piece by piece. Call it in one process.

    If it is interrupted, there is no `_METADATA`, so readers do not take the partial output for an item.
    """
    item.mkdir(parents=True)
    entries, arrays = {}, []
    for keys, node in _flat(tree):
        names = [str(key) for key in keys]
        kind = "None" if node is None else "Dict" if isinstance(node, Mapping) else "np.ndarray"
        entries[str(tuple(names))] = {
            "key_metadata": [{"key": str(key), "key_type": 1 if isinstance(key, int) else 2} for key in keys],
            "value_metadata": {"value_type": kind, "skip_deserialize": kind != "np.ndarray"},
        }
        if kind == "np.ndarray":
            arrays.append((".".join(names), node if isinstance(node, StoredLeaf) else in_memory(node)))
    _write_arrays(item, arrays)
    described = {"tree_metadata": entries, "use_ocdbt": True, "use_zarr3": False}
    write_json(item / METADATA, {**described, "store_array_data_equal_to_fill_value": True, "custom_metadata": None})


def _write_arrays(item: Path, arrays: Sequence[tuple[str, StoredLeaf]]) -> None:
    """Write each array by its name, with few pieces in flight at a time."""
    import tensorstore

    # One store with many concurrent writes: it syncs the disk once for all of them.
    context = tensorstore.Context()
    opening, pending, held = [], [], 0
    try:
        for name, leaf in arrays:
            first = next(blocks(leaf.everything, leaf.dtype.itemsize))
            chunk = [max(1, one.stop - one.start) for one in first]
            spec = {
                "driver": "zarr",
                "kvstore": {"driver": "ocdbt", "base": f"{item.as_uri()}/", "path": f"{name}/"},
                "metadata": {"shape": leaf.shape, "chunks": chunk, "compressor": {"id": "zstd", "level": 1}},
            }
            opening.append(tensorstore.open(spec, dtype=tensorstore.dtype(leaf.dtype), create=True, context=context))
        for (_, leaf), opened in zip(arrays, opening, strict=True):
            array = opened.result()
            with at_hand(leaf, item) as near:
                for where, piece in near.pieces():
                    pending.append(array[where].write(piece))
                    held += piece.nbytes
                    if held >= _CHUNKS_BYTES:
                        for one in pending:
                            one.result()
                        pending, held = [], 0
        for one in pending:
            one.result()
    except BaseException:
        # Pending writes would create files again in a directory that the caller removes.
        for one in (*opening, *pending):
            one.exception()
        raise


def _flat(tree: object, keys: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """The leaves of nested dicts and tuples, by their keys; None for an empty tuple."""
    if isinstance(tree, Mapping) and tree:
        for key, node in tree.items():
            yield from _flat(node, (*keys, key))
    elif isinstance(tree, tuple) and tree:
        for place, node in enumerate(tree):
            yield from _flat(node, (*keys, place))
    else:
        yield keys, None if isinstance(tree, tuple) else tree


def _described(item: Place) -> tuple[list[str], str]:
    """The paths of the item's arrays, and the tensorstore driver that reads them."""
    try:
        said = json.loads(item.read(METADATA))
        entries = said["tree_metadata"].values()
        # Entries without an array (an empty tuple, None) are listed too, with another value type.
        arrays = [entry for entry in entries if entry["value_metadata"]["value_type"] in _ARRAYS]
        paths = ["/".join(str(key["key"]) for key in entry["key_metadata"]) for entry in arrays]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{item}/{METADATA} is damaged ({type(error).__name__}: {error}); fetch it again"
        ) from error
    return paths, "zarr3" if said.get("use_zarr3") else "zarr"


_ARRAYS = ("jax.Array", "np.ndarray", "scalar")


def _leaf(item: Place, path: str, opening: Any) -> StoredLeaf:
    @contextlib.contextmanager
    def reading() -> Iterator[None]:
        try:
            yield
        except (ValueError, OSError) as error:
            said = str(error).partition(" [")[0]
            raise kind_for(error, CheckpointError)(
                f"{item} is truncated or damaged: its leaf {path} cannot be read ({said}); fetch it again"
            ) from error

    with reading():
        array = opening.result()
    chunk = tuple(array.chunk_layout.read_chunk.shape or ())
    dtype = np.dtype(array.dtype.numpy_dtype)
    chunk_bytes = math.prod(chunk) * dtype.itemsize
    at_once = max(1, _CHUNKS_BYTES // max(1, chunk_bytes))
    by_and_by = chunk_bytes > PIECE_BYTES and big_chunk.can_decode(array)

    def stream(index: Index) -> Iterator[Piece]:
        cells = _cells(index, chunk)
        while some := list(itertools.islice(cells, 1 if by_and_by else at_once)):
            with reading():
                if by_and_by:
                    yield from big_chunk.decode(array, some[0], chunk)
                    continue
                pending = [array[cell].read() for cell in some]
                for cell in some:
                    yield cell, pending.pop(0).result()

    return StoredLeaf.streamed(tuple(array.shape), dtype, chunk, stream)


def _cells(index: Index, chunk: tuple[int, ...]) -> Iterator[Index]:
    """The parts of `index` that are each in one chunk."""
    dims = []
    for one, size in zip(index, chunk, strict=True):
        begins = [one.start, *range((one.start // size + 1) * size, one.stop, size)]
        dims.append([slice(begin, end) for begin, end in zip(begins, [*begins[1:], one.stop], strict=True)])
    return itertools.product(*dims)
