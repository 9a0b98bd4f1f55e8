"""Settings of XLA, jax and NCCL before the devices start: one table, with a reason and a source per row.

It has only settings that are documented, or seen in compiled programs, to help, and are not the default. The user's
settings are never changed, and flags that this jaxlib does not know are never set, since they would end the process.
Read next: `xla_flags.py`, `session.py`.
"""

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Literal

from openpi_train.runtime import xla_flags
from openpi_train.runtime.exits import UsageError
from openpi_train.runtime.world import World

Extent = Literal["device", "devices", "hosts"]
"""What a run spreads over: one device, several devices of one host, or several hosts."""
_EXTENTS: tuple[Extent, ...] = ("device", "devices", "hosts")


@dataclasses.dataclass(frozen=True)
class Setting:
    """An environment variable, or a flag in XLA_FLAGS if it begins with "--", for one kind of device."""

    kind: str
    extent: Extent
    """The smallest extent that it applies to; larger ones get it, too."""
    name: str
    value: str
    reason: str
    source: str
    seen: str = ""
    """Of a flag: what programs compiled for 8 H100, not run, changed by it, per version of jax
    (docs/understand/benchmarks.md)."""


SETTINGS = (
    Setting(
        "gpu",
        "device",
        "XLA_CLIENT_MEM_FRACTION",
        "0.9",
        "training has the GPU to itself, and jax's default of 0.75 leaves a quarter of its memory idle",
        "docs.jax.dev/en/latest/gpu_memory_allocation.html; 0.9 is NVIDIA's choice in "
        "docs.nvidia.com/jax-toolbox/performance-profiling/gpu-performance",
    ),
    Setting(
        "gpu",
        "device",
        "--xla_gpu_dot_merger_threshold_mb",
        "0",
        "products that share an input stay apart: as one, XLA would join their weights and cut the result, by copies",
        "docs/understand/benchmarks.md: what it changes in compiled steps and in decoding",
        "full pi0's bound falls from 222.6 to 221.1 ms with jax 0.10.2, from 224.6 to 220.3 with 0.12.0.1",
    ),
    Setting(
        "gpu",
        "devices",
        "--xla_gpu_enable_latency_hiding_scheduler",
        "true",
        "lets collectives run while the GPU computes; jaxlib 0.10.2 and 0.12.0.1 do so without it, too",
        "docs.jax.dev/en/latest/gpu_performance_tips.html; docs.nvidia.com/jax-toolbox/environment-variables",
        "full pi0 with 4 rows: 71.0 ms, waiting included, with jax 0.10.2, also where it is false; 71.6 with 0.12.0.1, "
        "also where it is not set, and 98.3 where it is false",
    ),
    Setting(
        "gpu",
        "hosts",
        "NCCL_DEBUG",
        "WARN",
        "what fails between hosts is named in the log before the error comes; else it prints its version only",
        "docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html",
    ),
)


@dataclasses.dataclass(frozen=True)
class Decision:
    """Whether a row is applied in this environment, and why."""

    setting: Setting
    applied: bool
    line: str
    """For the log and for `doctor`."""


_OLD_FRACTION, _FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"
_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin", "jax_rocm7_plugin", "jax_rocm60_plugin")


def apply_settings(kind: str, environ: MutableMapping[str, str], extent: Extent = "device") -> list[str]:
    """Apply the table's settings for these devices, unless the user has set them; returns a log line per row.

    Raises:
        UsageError: a value that jax or XLA would refuse later with a worse message: both names of the memory fraction,
            an invalid fraction, or a flag in the user's XLA_FLAGS that this jaxlib does not know.
    """
    lines = _check_users_own(environ)
    for decision in decide(kind, environ, extent):
        setting = decision.setting
        if decision.applied and setting.name.startswith("--"):
            environ["XLA_FLAGS"] = " ".join([*users_flags(environ), f"{setting.name}={setting.value}"])
        elif decision.applied:
            environ[setting.name] = setting.value
        lines.append(decision.line)
    return lines


def decide(
    kind: str,
    environ: Mapping[str, str],
    extent: Extent,
    *,
    settings: Sequence[Setting] = SETTINGS,
    rejected: Callable[[str], str | None] = xla_flags.rejected,
) -> list[Decision]:
    """Decide on each row of `settings` for this kind and extent, without applying it.

    Args: `rejected` says why the installed jaxlib refuses a value of XLA_FLAGS, as `xla_flags.rejected` does.
    """
    decisions = []
    for setting in settings:
        if setting.kind != kind or _EXTENTS.index(setting.extent) > _EXTENTS.index(extent):
            continue
        told = f"{setting.name}={setting.value}"
        users = _users_value(setting.name, environ)
        if users is not None:
            decisions.append(Decision(setting, False, f"{setting.name}={users} (yours)"))
        elif setting.name.startswith("--") and (why := rejected(told)) != "":
            why = why or "it could not be found out whether this jaxlib knows it"
            decisions.append(Decision(setting, False, f"{told} left out: {why}"))
        else:
            decisions.append(Decision(setting, True, f"{told} ({setting.reason})"))
    return decisions


def extent_of(world: World, environ: Mapping[str, str]) -> Extent:
    """The extent of a run. If the number of processes per host is unknown, several processes count as several hosts."""
    if world.process_count > 1 and world.local_count != world.process_count:
        return "hosts"
    return "devices" if world.process_count > 1 or num_gpus(environ) > 1 else "device"


def _users_value(name: str, environ: Mapping[str, str]) -> str | None:
    if not name.startswith("--"):
        return environ.get(name)
    values = [flag.partition("=")[2] or "true" for flag in users_flags(environ) if flag.partition("=")[0] == name]
    return values[-1] if values else None


def users_flags(environ: Mapping[str, str]) -> list[str]:
    """The flags in XLA_FLAGS, or in the file that it names."""
    text = environ.get("XLA_FLAGS", "").strip()
    if text and not text.startswith("-"):
        try:
            text = Path(text).read_text()
        except OSError as error:
            raise UsageError(f"XLA_FLAGS={text!r} is neither flags nor a file of them ({error}); unset it") from error
    return text.split()


def _check_users_own(environ: MutableMapping[str, str]) -> list[str]:
    """Translate the memory fraction's old name, and refuse values that jax or XLA could not read."""
    lines = []
    if _OLD_FRACTION in environ:
        if _FRACTION in environ:
            raise UsageError(f"{_OLD_FRACTION} and {_FRACTION} are both set: unset the first, its old name")
        environ[_FRACTION] = environ.pop(_OLD_FRACTION)
        lines.append(f"{_FRACTION}={environ[_FRACTION]} (given by its old name {_OLD_FRACTION})")
    fraction = environ.get(_FRACTION, "1")
    if not fraction.replace(".", "", 1).isdecimal():
        raise UsageError(f"{_FRACTION}={fraction!r} is not a share of the GPU's memory such as 0.9")
    flags = users_flags(environ)
    if flags and (why := xla_flags.rejected(" ".join(flags))):
        raise UsageError(f"XLA_FLAGS={environ['XLA_FLAGS']!r} would end the process: {why}. Take it out of XLA_FLAGS")
    return lines


def device_kind(platforms: str | None, environ: Mapping[str, str]) -> str:
    """ "cpu", "gpu" or "tpu": the platform that jax will choose, found without starting it.

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
