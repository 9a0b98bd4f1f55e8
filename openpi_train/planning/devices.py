"""What devices can hold and do: memory in bytes, peak FLOP/s. Read next: `memory.py`."""

import re
from pathlib import Path
from typing import Any

import jax

# Dense bfloat16 peak in TFLOP/s, from the makers' data sheets (no sparsity); the first that `device_kind` matches.
PEAK_BF16_TFLOPS = (
    (r"B200", 2250.0),
    (r"GH200|H200|H100.*(SXM|HBM3)|H100 80GB", 989.0),
    (r"H100.*NVL", 835.0),
    (r"H100", 756.0),
    (r"A100", 312.0),
    (r"L40S", 362.0),
    (r"RTX 6000 Ada", 364.0),
    (r"RTX 5090", 210.0),
    (r"RTX 4090", 165.0),
    (r"RTX A6000|A40", 150.0),
    (r"RTX 3090", 71.0),
)


def peak_flops(device_kind: str) -> float | None:
    """Peak bfloat16 FLOP/s of one device, or None where it is not in the table (a CPU, for one)."""
    for pattern, tflops in PEAK_BF16_TFLOPS:
        if re.search(pattern, device_kind, re.IGNORECASE):
            return tflops * 1e12
    return None


def memory_bytes(device: Any, processes_on_host: int = 1) -> int:
    """Bytes that this process may use on one device.

    An accelerator reports its limit. CPU devices share the host's available memory (or the cgroup's limit) among
    themselves and with the other processes of the run on the host.
    """
    stats = device.memory_stats() or {}
    if stats.get("bytes_limit"):
        return int(stats["bytes_limit"])
    return _host_available_bytes() // (processes_on_host * jax.local_device_count())


def _host_available_bytes() -> int:
    available = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable:")
    )
    limit, current = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and current.is_file() and (text := limit.read_text().strip()).isdigit():
        available = min(available, int(text) - int(current.read_text()))
    return available
