"""One item of an Orbax checkpoint (a tree of arrays) read in parts, and written whole. Read next: `openpi.py`.

Orbax's own restore reads a whole tree at once, and meets all processes to do so. An item's layout is public: the JSON
`_METADATA` names its leaves, and each is a zarr array of its own, in one OCDBT store or in folders of their own.
"""

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.interop.place import Place
from openpi_train.interop.stored import Index, Leaves, StoredLeaf
from openpi_train.runtime.exits import CheckpointError

METADATA = "_METADATA"
# Chunks are decoded whole, however little of them is wanted: as many at a time as have so many bytes.
_CHUNKS_BYTES = 512 << 20


def open_item(item: Place) -> Leaves:
    """The item's leaves by path ("/" between keys). Only their descriptions are read. Raises CheckpointError."""
    import tensorstore

    paths, driver = _described(item)
    base: dict[str, Any] = {"driver": "ocdbt", "base": item.kvstore} if item.has("manifest.ocdbt") else {}

    def spec(path: str) -> dict[str, Any]:
        key = f"{path.replace('/', '.')}/"
        return {"driver": driver, "kvstore": {**base, "path": key} if base else f"{item.kvstore}{key}"}

    # A chunk is not kept once it is read: what is kept would add up to the whole item.
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}})
    opening = {path: tensorstore.open(spec(path), context=context, open=True, read=True) for path in paths}
    return {path: _leaf(item, path, pending) for path, pending in opening.items()}


def save_item(item: Path, tree: Mapping[str, Any]) -> None:
    """Write the tree of numpy arrays as Orbax does. Call it in one process; Orbax writes beside it and renames."""
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(item, tree)


def _described(item: Place) -> tuple[list[str], str]:
    """The paths of its arrays, and the tensorstore driver that reads them."""
    try:
        said = json.loads(item.read(METADATA))
        entries = said["tree_metadata"].values()
        # Keys that hold no array (an empty tuple, a None) are there too, under a type of their own.
        arrays = [entry for entry in entries if entry["value_metadata"]["value_type"] in _ARRAYS]
        paths = ["/".join(str(key["key"]) for key in entry["key_metadata"]) for entry in arrays]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{item}/{METADATA} is damaged ({type(error).__name__}: {error}); fetch it again"
        ) from error
    return paths, "zarr3" if said.get("use_zarr3") else "zarr"


_ARRAYS = ("jax.Array", "np.ndarray", "scalar")


def _leaf(item: Place, path: str, opening: Any) -> StoredLeaf:
    def fetch(pending: Any) -> Any:
        try:
            return pending.result()
        except (ValueError, OSError) as error:
            said = str(error).partition(" [")[0]
            raise CheckpointError(
                f"{item} is torn or damaged: its leaf {path} cannot be read ({said}); fetch it again"
            ) from error

    array = fetch(opening)

    chunk = tuple(array.chunk_layout.read_chunk.shape or ())
    dtype = np.dtype(array.dtype.numpy_dtype)
    at_once = max(1, _CHUNKS_BYTES // max(1, math.prod(chunk) * dtype.itemsize))

    def read(index: Index) -> np.ndarray:
        part = np.empty([one.stop - one.start for one in index], dtype)
        cells = _cells(index, chunk)
        while some := list(itertools.islice(cells, at_once)):
            for cell, pending in [(cell, array[cell].read()) for cell in some]:
                inside = (
                    slice(one.start - all_.start, one.stop - all_.start) for one, all_ in zip(cell, index, strict=True)
                )
                part[tuple(inside)] = fetch(pending)
        return part

    return StoredLeaf(shape=tuple(array.shape), dtype=dtype, read=read, chunk=chunk)


def _cells(index: Index, chunk: tuple[int, ...]) -> Iterator[Index]:
    """The parts of `index` that lie in one chunk each."""
    dims = []
    for one, size in zip(index, chunk, strict=True):
        begins = [one.start, *range((one.start // size + 1) * size, one.stop, size)]
        dims.append([slice(begin, end) for begin, end in zip(begins, [*begins[1:], one.stop], strict=True)])
    return itertools.product(*dims)
