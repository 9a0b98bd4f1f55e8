"""What XLA and jax are told before the devices start, as one table with a reason per row. Read next: `session.py`.

A variable that the user has set is never changed.
"""

import dataclasses
import importlib.util
import os
import platform
import zlib
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from openpi_train.runtime.exits import UsageError


@dataclasses.dataclass(frozen=True)
class Setting:
    """An environment variable for one kind of device."""

    kind: str
    variable: str
    value: str
    reason: str


SETTINGS = (
    Setting(
        "gpu",
        "XLA_CLIENT_MEM_FRACTION",
        "0.9",
        "training has the GPU to itself, and jax's default of 0.75 leaves a quarter of its memory idle",
    ),
)

_OLD_FRACTION, _FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"
_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin", "jax_rocm7_plugin", "jax_rocm60_plugin")


def apply_settings(kind: str, environ: MutableMapping[str, str]) -> list[str]:
    """Set what the table says for this kind of device and the user has not; returns a line per row for the log.

    Raises:
        UsageError: both the old and the new name of the memory fraction are set, which jax refuses later and worse.
    """
    lines = []
    if _OLD_FRACTION in environ:
        if _FRACTION in environ:
            raise UsageError(f"{_OLD_FRACTION} and {_FRACTION} are both set: unset the first, its old name")
        environ[_FRACTION] = environ.pop(_OLD_FRACTION)
        lines.append(f"{_FRACTION}={environ[_FRACTION]} (given by its old name {_OLD_FRACTION})")
    for setting in SETTINGS:
        if setting.kind != kind:
            continue
        if setting.variable in environ:
            lines.append(f"{setting.variable}={environ[setting.variable]} (yours)")
        else:
            environ[setting.variable] = setting.value
            lines.append(f"{setting.variable}={setting.value} ({setting.reason})")
    return lines


def device_kind(platforms: str | None, environ: Mapping[str, str]) -> str:
    """ "cpu", "gpu" or "tpu": what jax will choose, told without starting it.

    `platforms` is jax's own setting of that name, in order of preference; None or "" leaves the choice to jax.
    """
    first = (platforms or "").split(",")[0]
    if first:
        return {"cuda": "gpu", "rocm": "gpu"}.get(first, first)
    if num_gpus(environ) and any(importlib.util.find_spec(plugin) for plugin in _PLUGINS):
        return "gpu"
    return "tpu" if importlib.util.find_spec("libtpu") and Path("/dev/accel0").exists() else "cpu"


def num_gpus(environ: Mapping[str, str]) -> int:
    """GPUs that this process may use: those named in CUDA_VISIBLE_DEVICES, or all that the machine has."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len([path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()])


def compilation_cache_dir(environ: Mapping[str, str]) -> str:
    """The folder of compiled programs: JAX_COMPILATION_CACHE_DIR, or one per kind of machine in the user's cache.

    Machines that share a home directory may differ in their CPU, and a program compiled for one may crash another.
    """
    if given := environ.get("JAX_COMPILATION_CACHE_DIR"):
        return given
    home = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(home, "openpi_train", "compiled", f"{platform.machine()}-{zlib.crc32(_cpu_features()):08x}")


def _cpu_features() -> bytes:
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:  # not Linux
        return platform.processor().encode()
    return next((line for line in lines if line.startswith((b"flags", b"Features"))), b"")
