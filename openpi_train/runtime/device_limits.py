"""Memory in bytes and peak FLOP/s of the local devices. Read next: `device_kinds.py`."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from openpi_train.runtime.device_kinds import JaxDevice, kind_of, product_rate

# Share of a GPU's memory that jax may use (`runtime/xla.py` sets it).
CLIENT_SHARE = 0.9


def peak_flops(device_kind: str, dtype: DTypeLike = jnp.bfloat16) -> float | None:
    """Peak FLOP/s of one device in products of this type, or None if it is not in the table (such as a CPU)."""
    kind = kind_of(device_kind)
    return kind.peak_flops * product_rate(jnp.dtype(dtype).itemsize) if kind.is_known else None


def memory_bytes(device: JaxDevice, processes_on_host: int = 1) -> int:
    """Bytes that this process may use on one device.

    An accelerator reports its limit. CPU devices share the host's available memory (or the cgroup's limit) among
    themselves and with the other processes of the run on the host.
    """
    return _limit(device) or host_bytes_per_device(processes_on_host)


def total_bytes(device: JaxDevice, processes_on_host: int = 1) -> int:
    """`memory_bytes` of an otherwise idle device: a choice that depends on it is the same at every start."""
    return _limit(device) or _host_total_bytes() // (processes_on_host * jax.local_device_count())


def host_bytes_per_device(processes_on_host: int = 1) -> int:
    """Bytes of the host's available memory for each device of each process there."""
    return host_available_bytes() // (processes_on_host * jax.local_device_count())


def _limit(device: JaxDevice) -> int:
    """The memory limit that an accelerator reports; 0 for a CPU."""
    return int((device.memory_stats() or {}).get("bytes_limit") or 0)


def host_available_bytes() -> int:
    """Bytes of the host's memory, or of what this process's control group may use, that are available."""
    available, limit = _meminfo("MemAvailable"), _cgroup_limit()
    current = Path("/sys/fs/cgroup/memory.current")
    if limit is not None and current.is_file():
        available = min(available, limit - int(current.read_text()))
    return available


def _host_total_bytes() -> int:
    limit = _cgroup_limit()
    return _meminfo("MemTotal") if limit is None else min(_meminfo("MemTotal"), limit)


def _meminfo(name: str) -> int:
    """A line of /proc/meminfo, in bytes."""
    (kib,) = re.findall(rf"^{name}:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(kib) * 1024


def _cgroup_limit() -> int | None:
    """Bytes that this process's control group may use; None without a limit."""
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else ""
    return int(text) if text.isdigit() else None
