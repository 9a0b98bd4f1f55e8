"""Times a fixed product on each device of this process, so that a device that computes slowly is known.

In synchronous training the step of a throttled device ends with everybody's: the others wait for it within the step.
Read next: `slow_hosts.py`, which compares the devices.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from openpi_train.runtime import step_times
from openpi_train.runtime.device_kinds import JaxDevice
from openpi_train.runtime.device_limits import peak_flops
from openpi_train.runtime.gpu_health import gpu_state

logger = logging.getLogger(__name__)

EVERY_S = 60.0
# Rows of the square factors: as large as products of models, and 100 MiB with what is computed.
SIZE = 4096
# What the products take at the device's peak: long against what starts them and against `_POLL_S`, and with EVERY_S
# less than a thousandth of the time, even at half the peak.
_AT_PEAK_S = 0.015
_POLL_S = 1e-4
_AXIS = "device"


class DeviceSpeed:
    """The timed products of this process's devices, compiled when it is made; none on devices of unknown speed (CPUs).

    A CPU's speed depends on what else it does, which `StepTimes.stalled_s` tells.
    """

    def __init__(self, devices: Sequence[JaxDevice], clock: Callable[[], float] = time.monotonic):
        self._devices, self._clock = devices, clock
        self._looked_at, self._looks = -EVERY_S, 0
        self._reading: threading.Thread | None = None
        self._length = num_products(devices[0].device_kind)
        if self._length:
            with self._ends_where_memory_is_full():
                self._products = _compiled(devices, self._length)

    def look(self) -> bool:
        """Time the products, and note the times for process 0, unless that was less than `EVERY_S` ago; whether it did.

        To be called when the devices have ended all steps: it takes what the products take, and nothing waits before
        them. It uses nothing of the training, and no collective.
        """
        if not self._length or self._clock() - self._looked_at < EVERY_S:
            return False
        self._looked_at = self._clock()
        with self._ends_where_memory_is_full():
            seconds = timed(self._products)
            self._looks += 1
            step_times.note(products=self._looks, product_s=tuple(seconds))
            if self._reading is None or not self._reading.is_alive():
                slowest = self._devices[seconds.index(max(seconds))]
                self._reading = threading.Thread(target=_note_state, args=(slowest,), name="device state", daemon=True)
                self._reading.start()
        return True

    @contextlib.contextmanager
    def _ends_where_memory_is_full(self) -> Iterator[None]:
        """The products end, and the run goes on."""
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            logger.info("the speed of the devices is not measured: their memory is full")
            self._length = None


def num_products(device_kind: str) -> int | None:
    """How many products follow each other, the same on all devices of a kind; None: they are not timed."""
    peak = peak_flops(device_kind, jnp.bfloat16)
    return None if peak is None else max(round(_AT_PEAK_S * peak / (2 * SIZE**3)), 1)


def timed(products: Callable[[], jax.Array]) -> list[float]:
    """The seconds until each device has ended its products."""
    began = time.perf_counter()
    waiting = {place: shard.data for place, shard in enumerate(products().addressable_shards)}
    seconds = [0.0] * len(waiting)
    while waiting:
        time.sleep(_POLL_S)
        for place in [place for place, result in waiting.items() if result.is_ready()]:
            seconds[place] = time.perf_counter() - began
            jax.block_until_ready(waiting.pop(place))  # raises what has gone wrong
    return seconds


def _compiled(devices: Sequence[JaxDevice], length: int) -> Callable[[], jax.Array]:
    """A function that starts `length` products on each device, has run once, and returns a number of each."""
    mesh = Mesh(np.asarray(devices), (_AXIS,), axis_types=(AxisType.Auto,))

    def chain(seed):
        # With this variance long products neither overflow nor vanish. Of zeros a GPU needs less power.
        key = jax.random.key(seed[0])
        left = jax.random.normal(key, (SIZE, SIZE), jnp.bfloat16) / SIZE**0.5
        last = jax.lax.fori_loop(0, length, lambda _, right: (left @ right).astype(jnp.bfloat16), left)
        return jnp.max(last, keepdims=True)[0]

    per_device = PartitionSpec(_AXIS)
    seeds = jax.device_put(np.zeros(len(devices), np.uint32), NamedSharding(mesh, per_device))
    function = jax.jit(jax.shard_map(chain, mesh=mesh, in_specs=per_device, out_specs=per_device))
    compiled = function.lower(seeds).compile()
    jax.block_until_ready(compiled(seeds))
    return lambda: compiled(seeds)


def _note_state(device: JaxDevice) -> None:
    """Note the state of this device for process 0. It is computing the next steps meanwhile."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    place = device.local_hardware_id or 0
    step_times.note(device=gpu_state(visible[place].strip() if visible[0] else str(place)))
