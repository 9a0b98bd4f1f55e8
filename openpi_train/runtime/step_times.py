"""How much this process has held up the training so far, told to process 0 with its status.

Read next: `training/slow_hosts.py`, which compares the processes; `peer.py`, which carries it.
"""

import dataclasses
import threading
import time
from collections.abc import Mapping
from pathlib import Path

_PRESSURE = Path("/proc/pressure")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Totals of a start: steps, seconds in which the devices waited for this process, and those it waited for data.

    `product_s` are the seconds of the last timed product, of each local device; `products` counts them, and `device` is
    the state of the slowest of these devices, in words.
    `stalled_s` are seconds in which some program of the host has waited for the processor, for a disk or for memory
    (`cpu`, `io`, `memory`; empty if the kernel does not say), by a clock that shows `at_s`.
    """

    steps: int = 0
    late_s: float = 0.0
    data_s: float = 0.0
    products: int = 0
    product_s: tuple[float, ...] = ()
    device: str = ""
    at_s: float = 0.0
    stalled_s: Mapping[str, float] = dataclasses.field(default_factory=dict)


_own = StepTimes()
_noting = threading.Lock()


def note(**totals: object) -> None:
    """Record these fields of this process's totals."""
    global _own
    with _noting:  # of several threads
        _own = dataclasses.replace(_own, **totals)


def own() -> StepTimes:
    """This process's totals, with those of its host."""
    return dataclasses.replace(_own, at_s=time.monotonic(), stalled_s=_stalled_s())


def _stalled_s() -> dict[str, float]:
    """Linux's pressure stall information (docs.kernel.org/accounting/psi.html): "some avg10=.. total=microseconds"."""
    found = {}
    for resource in ("cpu", "io", "memory"):
        try:
            first = (_PRESSURE / resource).read_text().split("\n", 1)[0]
            found[resource] = int(first.rpartition("total=")[2]) / 1e6
        except (OSError, ValueError):
            return {}
    return found
