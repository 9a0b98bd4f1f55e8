"""Transfer of batch rows between a process's memory and its devices. Read next: `feed.py`."""

from typing import Any

import jax
import numpy as np


def local_rows(sharding: jax.sharding.Sharding, batch_size: int) -> np.ndarray:
    """The rows of the global batch that this process's devices hold, ascending, int64.

    Raises ValueError if the devices do not divide the batch.
    """
    try:
        parts = sharding.addressable_devices_indices_map((batch_size,))
    except ValueError as error:
        raise ValueError(
            f"a batch of {batch_size} rows does not divide over the devices ({sharding}): "
            "set --batch-size to a multiple of their number"
        ) from error
    spans = {index[0].indices(batch_size)[:2] for index in parts.values() if index is not None}
    return np.concatenate([np.arange(start, stop) for start, stop in sorted(spans)])


def on_devices(
    values: np.ndarray, sharding: jax.sharding.Sharding, batch_size: int, row_numbers: np.ndarray
) -> jax.Array:
    """A global array of `batch_size` rows; this process provides `values` [n, ...] for the rows `row_numbers`."""
    first_of = {int(number): place for place, number in enumerate(row_numbers)}

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None  # no device of the mesh is left out
        start, stop, _ = index[0].indices(batch_size)
        return values[first_of[start] : first_of[start] + stop - start]

    return jax.make_array_from_callback((batch_size, *values.shape[1:]), sharding, part)


def from_devices(array: Any) -> np.ndarray:
    """This process's rows of a global array, ascending: what `on_devices` placed."""
    parts = {shard.index[0].indices(array.shape[0])[0]: shard.data for shard in array.addressable_shards}
    return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)])
