"""The device mesh of a run. Read next: `strategy.py`, which decides what is sharded over its axes.

Axes: `replica` (copies of the parameters), `fsdp` (shards of one copy), `tensor` (split heads and wide
layers, `tensor.py`). A batch is sharded over `replica` and `fsdp` together; devices along `tensor` hold the same rows.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from openpi_train.runtime.device_kinds import JaxDevice

REPLICA, FSDP, TENSOR = "replica", "fsdp", "tensor"
AXES = (REPLICA, FSDP, TENSOR)
BATCH = PartitionSpec((REPLICA, FSDP))
REPLICATED = PartitionSpec()


def make_mesh(fsdp_devices: int, devices: Sequence[JaxDevice] | None = None, tensor_devices: int = 1) -> Mesh:
    """The mesh over all processes' devices; the remaining devices are replicas.

    Devices stay in process order, `tensor` is the innermost axis and `fsdp` the next, so such a group is within
    a host if it fits. Raises ValueError if their product does not divide the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
    grid = np.asarray(ordered).reshape(_extents(fsdp_devices, len(devices), tensor_devices))
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def planned_mesh(fsdp_devices: int, num_devices: int, tensor_devices: int = 1) -> AbstractMesh:
    """`make_mesh` for devices that need not be present: for shapes per device, not for running a program."""
    extents = _extents(fsdp_devices, num_devices, tensor_devices)
    return AbstractMesh(extents, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _extents(fsdp_devices: int, num_devices: int, tensor_devices: int) -> tuple[int, int, int]:
    """Devices along each axis."""
    if problem := does_not_divide(num_devices, tensor_devices, fsdp_devices):
        raise ValueError(problem)
    return num_devices // (fsdp_devices * tensor_devices), fsdp_devices, tensor_devices


def does_not_divide(num_devices: int, tensor_devices: int, fsdp_devices: int = 1) -> str | None:
    """What is wrong with these axis sizes, as a sentence with the allowed ones; None if they are valid."""
    flag, given, among, things = "--sharding.tensor-devices", tensor_devices, num_devices, "devices"
    if tensor_devices >= 1 and num_devices % tensor_devices == 0:
        flag, given, among = "--fsdp-devices", fsdp_devices, num_devices // tensor_devices
        things = "devices" if tensor_devices == 1 else f"groups of {tensor_devices} devices (--sharding.tensor-devices)"
    if given >= 1 and among % given == 0:
        return None
    divisors = ", ".join(str(n) for n in range(1, among + 1) if among % n == 0)
    return f"{flag} {given} does not divide the {among} {things} of this run; allowed: {divisors}"


def batch_sharding(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Rows sharded over all devices; devices of a tensor group hold the same rows."""
    return NamedSharding(mesh, BATCH)


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """The same value on every device."""
    return NamedSharding(mesh, REPLICATED)
