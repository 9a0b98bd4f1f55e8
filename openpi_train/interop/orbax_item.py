"""One item of an Orbax checkpoint (a tree of arrays) read in parts, and written whole. Read next: `openpi.py`.

Orbax's own restore reads a whole tree at once, and meets all processes to do so. An item's layout is public: the JSON
`_METADATA` names its leaves, and each is a zarr array of its own, in one OCDBT store or in folders of their own.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.interop.place import Place
from openpi_train.interop.stored import Index, Leaves, StoredLeaf
from openpi_train.runtime.exits import CheckpointError

METADATA = "_METADATA"


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

    def read(index: Index) -> np.ndarray:
        return fetch(array[index].read())

    return StoredLeaf(
        shape=tuple(array.shape),
        dtype=np.dtype(array.dtype.numpy_dtype),
        read=read,
        chunk=tuple(array.chunk_layout.read_chunk.shape or ()),
    )
