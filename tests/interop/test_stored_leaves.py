"""Leaves are read in parts: each device's own, once, cast where they are placed."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from openpi_train.interop.stored_leaves import in_memory, place

VALUES = np.arange(48, dtype=np.float32).reshape(8, 6)


def recording(chunk=None):
    """`VALUES` as a leaf, and the shapes of all parts that were read of it."""
    shapes = []

    def read(index):
        shapes.append(VALUES[index].shape)
        return VALUES[index]

    return dataclasses.replace(in_memory(VALUES), read=read, chunk=chunk), shapes


@pytest.mark.parametrize(
    ("spec", "chunk", "read"),
    [
        (PartitionSpec("x"), (2, 6), [(2, 6)] * 4),
        (PartitionSpec("x"), (8, 6), [(8, 6)]),  # a chunk is read whole anyway: once for all devices
        (PartitionSpec(), (8, 6), [(8, 6)]),
        (PartitionSpec(None, "y"), None, [(8, 3)] * 2),
    ],
)
def test_each_part_is_read_once(spec, chunk, read):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    leaf, shapes = recording(chunk)
    placed = place(leaf, jnp.bfloat16, NamedSharding(mesh, spec))
    assert placed.dtype == jnp.bfloat16 and placed.sharding.spec == spec
    np.testing.assert_array_equal(placed, VALUES.astype(ml_dtypes.bfloat16))
    assert shapes == read
