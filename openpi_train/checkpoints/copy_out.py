"""Copy a state from host memory or a local save to the run directory with Orbax, without the devices.

A `HostArray` replaces a leaf where Orbax expects a `jax.Array`. Orbax requests its pieces in the background, and
there waits for a local save to be complete and reads its file, so no memory is held. The loop continues meanwhile, so
nothing here may compute on devices or synchronise processes through them: the order would differ between processes.
Read next: `pieces.py` (what is written from where), `checkpoint_store.py` (which saves `HostArray`s).
"""

import concurrent.futures
import dataclasses
import functools
import math
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from numpy.typing import DTypeLike

from openpi_train.checkpoints.layout import Leaves
from openpi_train.checkpoints.pieces import Pieces, by_name, piece_name, writes
from openpi_train.interop.manifest import Sums, sums
from openpi_train.parallel.params import nested_params

_NICENESS = 10
# Where in an item a process writes its arrays.
_FOLDER = "ocdbt.process_{}"


class PieceSource:
    """The source of the pieces of one save: the file of a local save once it is complete, else memory."""

    def __init__(self, pieces: Pieces, written: concurrent.futures.Future[Pieces] | None = None):
        """`written` resolves to the pieces in the file, or to the error of writing them; None: no file."""
        self._pieces: Pieces | None = pieces
        self._written = written
        if written is not None:
            written.add_done_callback(self._leave_memory)

    @property
    def holds_memory(self) -> bool:
        """Whether the pieces stay in memory until `release`: there is no file, or writing it has failed."""
        written = self._written
        if written is None:
            return self._pieces is not None
        return written.done() and written.exception() is not None

    def pieces(self) -> Pieces:
        """All pieces. Waits until they are written; the file may be deleted afterwards."""
        if self._written is not None and self._written.exception() is None:
            return self._written.result()
        assert self._pieces is not None, "the pieces were released"
        return self._pieces

    def release(self) -> None:
        """Free the pieces: they have been copied, or will not be."""
        self._pieces = self._written = None

    def _leave_memory(self, written: concurrent.futures.Future[Pieces]) -> None:
        if written.exception() is None:
            self._pieces = None


class HostArray:
    """A leaf of a state for Orbax: the interface of a `jax.Array` that Orbax uses, with data from a `PieceSource`."""

    def __init__(self, name: str, number: int, leaf: Any, source: PieceSource):
        """`number` is the leaf's number for `pieces.writes`."""
        self.shape, self.dtype = leaf.shape, np.dtype(leaf.dtype)
        # Even for arrays in pinned host memory, which Orbax treats differently because slicing them can hang.
        self.sharding = leaf.sharding.with_memory_kind(None)
        self.size = math.prod(leaf.shape)
        self.nbytes = self.size * self.dtype.itemsize
        self._name, self._number, self._source = name, number, source

    @property
    def addressable_shards(self) -> list["_Shard"]:
        """The shards of this process's devices; of equal shards one is replica 0, which Orbax writes."""
        pieces, shape, shards = self._source.pieces(), self.sharding.shard_shape(self.shape), []
        for device, index in self.sharding.addressable_devices_indices_map(self.shape).items():
            is_written = writes(device, self._number, self.sharding, self.shape)
            piece = pieces[piece_name(self._name, index, self.shape)] if is_written else None
            shards.append(_Shard(index=index, replica_id=0 if is_written else 1, data=_Data(shape, piece)))
        return shards


def host_arrays(items: Mapping[str, Leaves], source: PieceSource) -> dict[str, Leaves]:
    """`HostArray`s for the leaves of `items` (arrays or shapes), with pieces from `source`."""
    numbers = {name: number for number, (name, _) in enumerate(by_name(items))}

    def stand_in(name: str, leaf: object) -> HostArray:
        return HostArray(name, numbers[name], leaf, source)

    return {
        item: {path: stand_in(f"{item}/{path}", leaf) for path, leaf in leaves.items()}
        for item, leaves in items.items()
    }


class ArrayWriter:
    """Writes the arrays of checkpoints with these items, from any thread, one at a time. One on every process.

    Orbax's handlers write a process's part without a word to the others. Its `AsyncCheckpointer` would have them wait
    for one that could not write, for as long as that lives.
    """

    def __init__(self, *items: str):
        sys.unraisablehook = functools.partial(_not_of_late_writes, sys.unraisablehook)
        dispatcher: Any = _Dispatcher()
        handler = ocp.type_handlers.ArrayHandler(use_replica_parallel=False, dispatcher=dispatcher)
        registry = ocp.type_handlers.create_type_handler_registry((HostArray, handler))
        self._handlers = {item: ocp.PyTreeCheckpointHandler(type_handler_registry=registry) for item in items}

    def begin(self, directory: Path) -> None:
        """Make the folders of the items, on one process, before any writes."""
        for item in self._handlers:
            (directory / item).mkdir()

    def write(self, directory: Path, arrays: Mapping[str, Leaves], source: PieceSource) -> dict[str, Sums]:
        """Write this process's part of the result of `host_arrays`, and release `source`.

        Returns the sums of what it has written, if there are several processes, by its folders in `directory`. It reads
        the files for them while they are in its host's memory, and sees them: a file server may not show others new
        files for a while.
        """
        try:
            for item, leaves in arrays.items():
                self._handlers[item].save(epath.Path(directory / item), args=ocp.args.PyTreeSave(nested_params(leaves)))
        finally:
            source.release()
        folder = _FOLDER.format(jax.process_index())
        if jax.process_count() == 1:
            return {}
        return {f"{item}/{folder}": sums(place) for item in arrays if (place := directory / item / folder).is_dir()}

    def finish(self, directory: Path) -> None:
        """Join the parts, on one process, once all have written."""
        for item, handler in self._handlers.items():
            handler.finalize(epath.Path(directory / item))

    def close(self) -> None:
        """End Orbax's threads."""
        for handler in self._handlers.values():
            handler.close()


def _not_of_late_writes(otherwise: Callable[[Any], object], unraisable: Any) -> None:
    """As usual, but where a write has failed, tensorstore's threads print that Orbax does not hear of the others."""
    if str(unraisable.exc_value) != "Event loop is closed":
        otherwise(unraisable)


def background_thread() -> concurrent.futures.ThreadPoolExecutor:
    """One thread for writing, with lower priority than the step and data workers, as are the threads that it starts."""
    return concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=_lower_priority)


def _lower_priority() -> None:
    if sys.platform == "linux":  # elsewhere threads have no priority of their own
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Shard:
    index: tuple[slice, ...]
    replica_id: int
    data: "_Data"


class _Data:
    """An array that looks to Orbax like one on a device; it becomes a numpy array on writing."""

    def __init__(self, shape: tuple[int, ...], array: np.ndarray | None):
        """`array` is None if Orbax must not write it."""
        self.shape, self._array = shape, array

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        del dtype, copy
        assert self._array is not None, "a piece that is written elsewhere"
        return self._array


class _Dispatcher:
    """Orbax's interface to fetch arrays for `ArrayHandler`; here they are already on the host."""

    def name(self) -> str:
        return "host arrays"

    def device_to_host(self, arrays: object) -> Any:
        return arrays

    def dispatch(
        self, function: Callable[..., object], *, input_arrays: object, func_kwargs: Mapping[str, object]
    ) -> Any:
        """Write the arrays, in Orbax's background thread."""
        return function(input_arrays, **func_kwargs)
