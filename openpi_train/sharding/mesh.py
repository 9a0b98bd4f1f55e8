"""The device mesh of a run. Read next: `strategy.py`, which decides what is cut over its axes.

Axes: `replica` (copies of the parameters), `fsdp` (one copy cut into shards), `tensor` (reserved for cutting single
matrices; size 1 so far). A batch is cut over `replica` and `fsdp` together.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

REPLICA, FSDP, TENSOR = "replica", "fsdp", "tensor"
AXES = (REPLICA, FSDP, TENSOR)
BATCH = PartitionSpec((REPLICA, FSDP))
REPLICATED = PartitionSpec()


def make_mesh(fsdp_devices: int, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh (replica = devices / fsdp_devices, fsdp = fsdp_devices, tensor = 1) over all processes' devices.

    Devices stay in process order and `fsdp` is the inner axis, so that a shard group lies within a host where it fits.
    Raises ValueError where `fsdp_devices` does not divide the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    if fsdp_devices < 1 or len(devices) % fsdp_devices:
        divisors = [n for n in range(1, len(devices) + 1) if len(devices) % n == 0]
        raise ValueError(
            f"--fsdp-devices {fsdp_devices} does not divide the {len(devices)} devices of this run; "
            f"allowed: {', '.join(map(str, divisors))}"
        )
    ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
    grid = np.asarray(ordered).reshape(-1, fsdp_devices, 1)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows cut over all devices."""
    return NamedSharding(mesh, BATCH)


def replicated(mesh: Mesh) -> NamedSharding:
    """The same value on every device."""
    return NamedSharding(mesh, REPLICATED)
