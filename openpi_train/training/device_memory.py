"""The memory of a process's devices while it trains. Read next: `run.py` and `progress_report.py`, which tell it."""

import dataclasses
from collections.abc import Mapping

import jax

from openpi_train.runtime.device_kinds import GIB


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class DeviceMemory:
    """Bytes of a device: the most in use so far, those in use now, and those that jax may use (0: unknown)."""

    peak: int
    now: int
    limit: int

    def line(self) -> str:
        """For the progress line."""
        limit = f"/{self.limit / GIB:.1f}" if self.limit else ""
        return f"device memory {self.peak / GIB:.1f}{limit} GiB"

    def metrics(self) -> Mapping[str, float]:
        """By their names in `metrics.jsonl`."""
        return {"device/memory_gib": self.now / GIB, "device/memory_peak_gib": self.peak / GIB}


def fullest_device() -> DeviceMemory | None:
    """That of this process's device with the highest peak; None where the platform does not report it (CPUs)."""
    found = [stats for device in jax.local_devices() if (stats := device.memory_stats())]
    memories = [
        DeviceMemory(
            peak=stats["peak_bytes_in_use"], now=stats.get("bytes_in_use", 0), limit=stats.get("bytes_limit", 0)
        )
        for stats in found
    ]
    return max(memories, default=None)
