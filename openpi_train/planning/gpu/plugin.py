"""jax's CUDA plugin on a machine without a GPU: its environment, the devices to compile for, and what jax asks a GPU.

The only file with private names of jax (0.10.2 to 0.12.0). `tests/planning/gpu/test_plugin.py` says when they change.
Read next: `targets.py`.
"""

import contextlib
import importlib.metadata
import importlib.util
from collections.abc import Iterator, MutableMapping
from typing import Any

from openpi_train.planning.gpu.targets import CUDNN, GpuTarget
from openpi_train.runtime import xla
from openpi_train.runtime.device_kinds import DeviceKind
from openpi_train.runtime.exits import UsageError

PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
# jax calls these three functions of one module to ask cuDNN and the local GPU what they can do.
ASKING_MODULE = "jax._src.cudnn.fused_attention_stablehlo"
ASKED = ("check_cudnn_version", "check_compute_capability", "is_cuda_compute_capability_equal")
_ENVIRONMENT = {
    # No GPU is used, even where there is one: the same program on every machine.
    "CUDA_VISIBLE_DEVICES": "-1",
    # The plugin would else ask the driver, which need not be there, for its version.
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "JAX_PLATFORMS": "",
    # Programs for devices that are not there cannot be read from it.
    "JAX_ENABLE_COMPILATION_CACHE": "false",
}
# Triton's products are tuned on a device: without one XLA calls cuBLAS. jaxlib 0.11 would then compute a product that
# is both kept and used twice, once in its place in the stack, as it does not where it tunes.
_FLAGS = ("--xla_gpu_enable_triton_gemm=false", "--xla_gpu_enable_dynamic_slice_fusion=false")


def is_installed() -> bool:
    """Whether the plugin is there, for either CUDA."""
    return any(importlib.util.find_spec(name) for name in PLUGINS)


def require() -> None:
    """Raise UsageError, with the command that installs it, if the plugin is missing."""
    if not is_installed():
        raise UsageError(f"{how_to_install()}; `plan --compiler cpu` needs none")


def how_to_install() -> str:
    """A sentence that says what is missing, with the command that installs it."""
    version = importlib.metadata.version("jax")
    return (
        "XLA's GPU compiler comes with jax's CUDA plugin, which is not installed (no GPU is needed; about 4 GB): "
        f"pip install 'jax[cuda13]=={version}'"
    )


def set_environment(environ: MutableMapping[str, str], num_devices: int, num_hosts: int) -> list[str]:
    """Set what the plugin needs where there is no GPU, and what a run on such GPUs sets; returns its log lines.

    Call it before jax is imported. Raises UsageError if the plugin is missing.
    """
    require()
    environ.update(_ENVIRONMENT)
    lines = xla.apply_settings("gpu", environ, "hosts" if num_hosts > 1 else "devices" if num_devices > 1 else "device")
    given = xla.users_flags(environ)
    names = {flag.partition("=")[0] for flag in given}
    environ["XLA_FLAGS"] = " ".join([*given, *(flag for flag in _FLAGS if flag.partition("=")[0] not in names)])
    return lines


def devices(target: GpuTarget, memory_bytes: int, num_devices: int, num_hosts: int) -> list[Any]:
    """Devices of this kind to compile for, host after host; nothing can run on them."""
    from jax.experimental import topologies

    topology = f"1x{num_hosts}x{num_devices // num_hosts}"
    described = topologies.get_topology_desc(
        platform="cuda", target_config=target.text(memory_bytes), topology=topology
    )
    return list(described.devices)


@contextlib.contextmanager
def pretended(target: GpuTarget | DeviceKind) -> Iterator[None]:
    """What jax and the models ask of the local GPU while they trace a program is answered for `target`.

    A jax that has none of these functions asks in another way, which is not answered.
    """
    from openpi_train.nn.attention import compiling_for

    module: Any = None
    with contextlib.suppress(ImportError):
        module = importlib.import_module(ASKING_MODULE)
    capability = _numbers(target.compute_capability)
    answers = {
        "check_cudnn_version": lambda: CUDNN[0] * 10_000 + CUDNN[1] * 100 + CUDNN[2],
        "check_compute_capability": lambda least: capability >= _numbers(least),
        "is_cuda_compute_capability_equal": lambda other: capability == _numbers(other),
    }
    kept = {name: getattr(module, name) for name in ASKED if hasattr(module, name)}
    try:
        for name in kept:
            setattr(module, name, answers[name])
        with compiling_for(target):
            yield
    finally:
        for name, function in kept.items():
            setattr(module, name, function)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
