"""Self-test of collectives: tiny sums over all devices, checked and timed before the first compilation.

It finds a broken link or a hanging device within seconds, and names it. Read next: `session.py`.
"""

import contextlib
import dataclasses
import faulthandler
import logging
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from openpi_train.runtime import agree, exits, phases
from openpi_train.runtime.exits import NumbersError
from openpi_train.runtime.waiting import Wait

logger = logging.getLogger(__name__)

# Connecting hundreds of GPUs takes tens of seconds.
TIMEOUT_S = 180.0
_NAME = "collective self-test"
_AXIS = "all"
_SMALL, _LARGE = 2, 1 << 20  # float32 values: 8 B show the latency, 4 MiB the bandwidth
_SMALL_ROUNDS, _LARGE_ROUNDS = 11, 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collectives:
    """Times of all-reduces over all devices of the run, by this process's clock."""

    devices: int
    hosts: int
    first_s: float
    """Compiling, making all connections, and one sum of each size."""
    latency_s: float
    """Median for 8 bytes per device."""
    size_bytes: int
    transfer_s: float
    """Median for `size_bytes` per device."""

    def line(self) -> str:
        """For people."""
        return (
            f"collectives over {self.devices} devices on {self.hosts} host{'s' if self.hosts > 1 else ''}: "
            f"latency {1e3 * self.latency_s:.2f} ms, {self.size_bytes >> 20} MiB all-reduce "
            f"{self.size_bytes / self.transfer_s / 1e9:.2g} GB/s (after {self.first_s:.1f} s to connect)"
        )

    def as_json(self) -> dict[str, float]:
        """For `environment.json`."""
        return dataclasses.asdict(self)


def measure(timeout_s: float = TIMEOUT_S) -> Collectives | None:
    """Sum over all devices, check the sums, and return the times; None with one device. Every process must call it.

    If it takes longer than `timeout_s`, a collective hangs: the process logs this and exits with code 70.

    Raises:
        NumbersError: a sum is wrong.
        PeerLostError: a process does not come.
    """
    devices = jax.devices()
    if len(devices) == 1:
        return None
    mesh = Mesh(np.asarray(devices), (_AXIS,), axis_types=(AxisType.Auto,))
    with phases.phase(_NAME, abandonable=True):
        hosts = len(set(agree.gather(_NAME, socket.gethostname(), timeout_s)))
        with _ended_after(timeout_s, f"{len(devices)} devices on {hosts} hosts"):
            begin = time.perf_counter()
            small, large = _contributions(mesh, _SMALL), _contributions(mesh, _LARGE)
            add = jax.jit(
                jax.shard_map(
                    lambda x: jax.lax.psum(x, _AXIS),
                    mesh=mesh,
                    in_specs=PartitionSpec(_AXIS),
                    out_specs=PartitionSpec(),
                )
            )
            for contributions in (small, large):
                _check(add(contributions), len(devices))
            return Collectives(
                devices=len(devices),
                hosts=hosts,
                first_s=time.perf_counter() - begin,
                latency_s=_median_s(add, small, _SMALL_ROUNDS),
                size_bytes=_LARGE * 4,
                transfer_s=_median_s(add, large, _LARGE_ROUNDS),
            )


def _contributions(mesh: Mesh, count: int) -> jax.Array:
    """`count` float32 values per device: 1 on the first, 2 on the second, and so on."""

    def fill(index: Any) -> np.ndarray:
        return np.full(count, (index[0].start or 0) // count + 1, np.float32)

    sharding = NamedSharding(mesh, PartitionSpec(_AXIS))
    return jax.make_array_from_callback((mesh.size * count,), sharding, fill)


def _check(total: jax.Array, count: int) -> None:
    expected = count * (count + 1) / 2  # exact in float32 up to 5,792 devices
    wrong = [shard for shard in total.addressable_shards if not (np.asarray(shard.data) == expected).all()]
    if wrong:
        raise NumbersError(
            f"{_NAME}: the {count} devices do not add up. On {socket.gethostname()}, {wrong[0].device} has "
            f"{np.unique(np.asarray(wrong[0].data))[:4].tolist()} where 1 + ... + {count} = {expected:g}; "
            "a device or a link of this host is broken: run without it"
        )


def _median_s(add: Any, contributions: jax.Array, rounds: int) -> float:
    durations = []
    for _ in range(rounds):
        begin = time.perf_counter()
        add(contributions).block_until_ready()
        durations.append(time.perf_counter() - begin)
    return statistics.median(durations)


@contextlib.contextmanager
def _ended_after(timeout_s: float, who: str) -> Iterator[None]:
    """Log every ten seconds that it still runs, and end the process after the time-out: a hang is in C++."""
    done = threading.Event()
    wait = Wait(timeout_s)

    def watch() -> None:
        while not done.wait(min(1.0, wait.remaining_s())):
            wait.report(lambda: f"{_NAME} over {who}")
            if wait.is_over():
                logger.error(
                    "%s: no answer within %.0f s from %s. A network between hosts that only lets some ports through, "
                    "or a GPU that hangs, look like this: try `python -m openpi_train doctor` on each host, and in "
                    "several with `launch`",
                    *(_NAME, timeout_s, who),
                )
                faulthandler.dump_traceback()
                exits.end(exits.PEER_LOST)

    thread = threading.Thread(target=watch, name=_NAME, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
