"""The shards of a state on this process's devices, as named pieces in host memory.

A piece is a device's part of one leaf; devices of a process with the same part share the piece. Its
name gives leaf and span, `params/params/llm/w[0:8,0:4]`, so pieces fit another state exactly if their names do.
A local save holds all pieces of a process; each process writes a share of the run directory's checkpoint (`writes`).
Read next: `local_files.py` (pieces on a disk), `copy_out.py` (pieces as Orbax writes them).
"""

import collections
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from openpi_train.checkpoints.layout import Leaves
from openpi_train.runtime.device_kinds import JaxDevice
from openpi_train.runtime.device_limits import host_available_bytes

logger = logging.getLogger(__name__)

Pieces = Mapping[str, np.ndarray]


def fetch(items: Mapping[str, Leaves]) -> dict[str, np.ndarray]:
    """The pieces of all leaves (arrays, by item and path) on the host; the arrays may be donated afterwards."""
    found: dict[str, jax.Array] = {}
    for number, (leaf, array) in enumerate(by_name(items)):
        shards = array.addressable_shards
        first = number % len(shards)  # each device has its own link: replicated pieces are read in turn
        for shard in (*shards[first:], *shards[:first]):
            found.setdefault(piece_name(leaf, shard.index, array.shape), shard.data)
    return _to_host(found)


def fetch_share(items: Mapping[str, Leaves]) -> dict[str, np.ndarray]:
    """As `fetch`, but only the pieces that this process writes to the run directory."""
    found: dict[str, jax.Array] = {}
    for number, (leaf, array) in enumerate(by_name(items)):
        for shard in array.addressable_shards:
            if writes(shard.device, number, array.sharding, array.shape):
                found[piece_name(leaf, shard.index, array.shape)] = shard.data
    return _to_host(found)


def writes(device: JaxDevice, number: int, sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> bool:
    """Whether a leaf's piece on this device is written from here, and not from another device with the same piece.

    `number` is the leaf's number: processes, and devices within them, take turns leaf by leaf.
    """
    holders = _holders(sharding, shape)[device]
    return holders[number % len(holders)] == device


def describe_pieces(items: Mapping[str, Leaves]) -> dict[str, str]:
    """dtype and shape, as `float32[2, 3]`, of each piece that this process's devices hold of arrays or shapes."""
    described = {}
    for leaf, array in by_name(items):
        text = f"{np.dtype(array.dtype).name}{list(array.sharding.shard_shape(array.shape))}"
        for index in array.sharding.addressable_devices_indices_map(array.shape).values():
            described[piece_name(leaf, index, array.shape)] = text
    return described


def place(pieces: Pieces, wanted: Mapping[str, Leaves]) -> dict[str, Leaves]:
    """Place the pieces on the devices as arrays, sharded like `wanted` (arrays or shapes); by item and path."""

    def put(leaf: str, like: Any) -> jax.Array:
        def piece(index: Any) -> np.ndarray:
            return pieces[piece_name(leaf, index, like.shape)]

        return jax.make_array_from_callback(like.shape, like.sharding, piece)

    return {
        item: {path: put(f"{item}/{path}", like) for path, like in leaves.items()} for item, leaves in wanted.items()
    }


def dtype_and_shape(description: str) -> tuple[np.dtype, tuple[int, ...]]:
    """Parse a description of `describe_pieces`: "float32[2, 3]" gives float32 and (2, 3)."""
    name, _, shape = description.removesuffix("]").partition("[")
    return np.dtype(name), tuple(int(size) for size in shape.split(",") if size)


def piece_name(leaf: str, index: Sequence[slice], shape: Sequence[int]) -> str:
    """The name of the piece of `leaf` at `index`, in jax's form of shard indices."""
    spans = (part.indices(size) for part, size in zip(index, shape, strict=True))
    return f"{leaf}[{','.join(f'{start}:{stop}' for start, stop, _ in spans)}]"


def by_name(items: Mapping[str, Leaves]) -> Iterator[tuple[str, Any]]:
    """The leaves of all items by `item/path`, in the same order on all processes."""
    for item, leaves in items.items():
        for path, leaf in leaves.items():
            yield f"{item}/{path}", leaf


def _to_host(arrays: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    pinned = _pinned(arrays) if jax.default_backend() == "gpu" else {}
    for name in arrays.keys() - pinned.keys():
        arrays[name].copy_to_host_async()

    def on_host(name: str, array: jax.Array) -> np.ndarray:
        if name in pinned:
            return np.asarray(pinned[name])
        return np.array(array) if _is_in_host_memory(array) else np.asarray(array)

    return {name: on_host(name, array) for name, array in arrays.items()}


def _pinned(arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Copies of the arrays on devices in pinned host memory, as far as there is room (`_pinned_limit`).

    A GPU writes to it at the speed of its link, and to other memory through a small pinned part, thirty times as slowly
    (docs/understand/benchmarks.md). jax keeps the memory for the next save.
    """
    copies, room = {}, _pinned_limit()
    for name, array in arrays.items():
        if _is_in_host_memory(array):
            continue
        room -= array.nbytes
        if room < 0:
            break
        copies[name] = array
    try:
        pinned = {name: array.sharding.with_memory_kind("pinned_host") for name, array in copies.items()}
        return jax.block_until_ready(jax.device_put(copies, pinned))
    except jax.errors.JaxRuntimeError as error:
        logger.warning("the state is saved by slower copies, as there is too little pinned memory: %s", error)
        return {}


@functools.cache
def _pinned_limit() -> int:
    """Bytes of a state that are copied through pinned memory: a quarter of what was available at the first save, as it
    stays allocated, and less than the 64 GiB to which XLA limits it."""
    return min(host_available_bytes() // 4, 48 * 2**30)


def _is_in_host_memory(array: jax.Array) -> bool:
    """Whether numpy would view the array in place, which would keep the next step from reusing its memory."""
    return jax.default_backend() == "cpu" or array.sharding.memory_kind in ("pinned_host", "unpinned_host")


@functools.lru_cache(maxsize=4096)
def _holders(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> Mapping[Any, list[Any]]:
    """For each device, all devices with the same piece: the first of each process, then the second of each, and so
    on."""
    indices = sharding.devices_indices_map(shape)
    names = {device: piece_name("", index or (), shape) for device, index in indices.items()}
    holders: dict[str, list[Any]] = collections.defaultdict(list)
    counts, turns = collections.Counter(), {}
    for device, name in names.items():
        turns[device] = counts[name, device.process_index], device.process_index
        counts[name, device.process_index] += 1
        holders[name].append(device)
    for found in holders.values():
        found.sort(key=turns.__getitem__)
    return {device: holders[name] for device, name in names.items()}
