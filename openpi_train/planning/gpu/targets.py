"""Descriptions of GPUs for XLA's compiler, which needs no GPU if it has one. Read next: `plugin.py`, `device_kinds.py`.

XLA reads them as a text proto (`stream_executor.GpuTargetConfigProto`). The sizes decide how it tiles and fuses; memory
and bandwidth what its scheduler believes that fits and how long a kernel takes.
"""

import dataclasses
from typing import Any

from openpi_train.runtime.device_kinds import DeviceKind, find_kind
from openpi_train.runtime.exits import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuTarget:
    """A kind of GPU (`kind` is the name in `device_kinds.py`) as the compiler sees it. Bytes and GHz.

    A core is a streaming multiprocessor. `shared_bytes` is the shared memory of a core, of which one block may ask for
    `block_shared_bytes`.
    """

    kind: str
    device_kind: str
    num_cores: int
    lanes_per_core: int
    threads_per_core: int
    shared_bytes: int
    block_shared_bytes: int
    cache_bytes: int
    clock_ghz: float
    source: str
    platform: str = "cuda"
    """As a jax device has it: `nn/attention.py` asks such a device."""

    @property
    def compute_capability(self) -> str:
        """As `device_kinds.py` has it."""
        return find_kind(self.kind).compute_capability

    @property
    def bandwidth(self) -> float:
        """Bytes/s of the device memory, as `device_kinds.py` has them."""
        return find_kind(self.kind).memory_gb_s * 1e9

    def text(self, memory_bytes: int) -> str:
        """The description of such a GPU with this much memory."""
        major, minor = self.compute_capability.split(".")
        extension = "ACCELERATED_FEATURES" if int(major) >= 9 else "NONE"
        return f"""
gpu_device_info {{
  name: "{self.device_kind}"  device_vendor: "NVIDIA Corporation"  device_memory_size: {memory_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
  core_count: {self.num_cores}  fpus_per_core: {self.lanes_per_core}  clock_rate_ghz: {self.clock_ghz}
  memory_bandwidth: {self.bandwidth:.0f}  l2_cache_size: {self.cache_bytes}
  shared_memory_per_core: {self.shared_bytes}  shared_memory_per_block_optin: {self.block_shared_bytes}
  threads_per_core_limit: {self.threads_per_core}
{_OF_ALL}}}
platform_name: "CUDA"
dnn_version_info {{ {_version(CUDNN)} }}
runtime_version {{ {_version(CUDA)} }}
device_description_str: "{self.device_kind}"
"""


# cuDNN as in the descriptions that XLA keeps, CUDA as jax[cuda12] 0.10.2 brings it.
CUDNN, CUDA = (9, 10, 0), (12, 9, 0)
# The same for every architecture from 8.0 on (CUDA C++ Programming Guide, table "Technical Specifications").
_OF_ALL = (
    "  threads_per_warp: 32  threads_per_block_limit: 1024  shared_memory_per_block: 49152\n"
    "  thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64\n"
    f"  block_dim_limit_x: {2**31 - 1}  block_dim_limit_y: {2**16 - 1}  block_dim_limit_z: {2**16 - 1}\n"
    "  registers_per_core_limit: 65536  registers_per_block_limit: 65536\n"
)


def _version(numbers: tuple[int, int, int]) -> str:
    return "major: {} minor: {} patch: {}".format(*numbers)


def _sxm(name: str) -> str:
    return f"github.com/openxla/xla: xla/backends/gpu/target_config/specs/{name}.txtpb (4336d12)"


# Ada (8.9) has no file there: the figures are those of its architecture, its shared memory by the CUDA C++ Programming
# Guide.
_ADA: dict[str, Any] = {
    "lanes_per_core": 128,
    "threads_per_core": 1536,
    "shared_bytes": 100 * 1024,
    "block_shared_bytes": 99 * 1024,
}
_AMPERE = {
    "num_cores": 108,
    "lanes_per_core": 64,
    "threads_per_core": 2048,
    "shared_bytes": 167936,
    "block_shared_bytes": 166912,
    "cache_bytes": 41943040,
    "clock_ghz": 1.41,
}
_HOPPER = {
    "num_cores": 132,
    "lanes_per_core": 128,
    "threads_per_core": 2048,
    "shared_bytes": 233472,
    "block_shared_bytes": 232448,
    "cache_bytes": 52428800,
    "clock_ghz": 1.98,
}

TARGETS = (
    GpuTarget(
        kind="b200",
        device_kind="NVIDIA B200",
        source=_sxm("b200"),
        **{**_HOPPER, "num_cores": 148, "cache_bytes": 132644864, "clock_ghz": 1.965},
    ),
    GpuTarget(kind="h200", device_kind="NVIDIA H200", source=_sxm("h200"), **_HOPPER),
    GpuTarget(kind="h100", device_kind="NVIDIA H100 80GB HBM3", source=_sxm("h100_sxm"), **_HOPPER),
    GpuTarget(kind="a100", device_kind="NVIDIA A100-SXM4-80GB", source=_sxm("a100_sxm_80"), **_AMPERE),
    GpuTarget(
        kind="a100-40gb",
        device_kind="NVIDIA A100-SXM4-40GB",
        source=_sxm("a100_sxm_40"),
        **_AMPERE,
    ),
    GpuTarget(
        kind="l40s",
        device_kind="NVIDIA L40S",
        num_cores=142,
        cache_bytes=96 * 2**20,
        clock_ghz=2.52,
        source="L40S data sheet; Ada GPU Architecture v2, appendix",
        **_ADA,
    ),
    GpuTarget(
        kind="rtx6000-ada",
        device_kind="NVIDIA RTX 6000 Ada Generation",
        num_cores=142,
        cache_bytes=96 * 2**20,
        clock_ghz=2.505,
        source="RTX 6000 Ada Generation data sheet; Ada GPU Architecture v2, appendix",
        **_ADA,
    ),
    GpuTarget(
        kind="rtx4090",
        device_kind="NVIDIA GeForce RTX 4090",
        num_cores=128,
        cache_bytes=72 * 2**20,
        clock_ghz=2.52,
        source="Ada GPU Architecture v2, appendix A",
        **_ADA,
    ),
)


KINDS_OF_TARGETS = tuple(find_kind(target.kind) for target in TARGETS)


def has_target(kind: DeviceKind) -> bool:
    """Whether there is a description of this kind."""
    return kind in KINDS_OF_TARGETS


def target_of(kind: DeviceKind) -> GpuTarget:
    """The description of a kind. Raises UsageError if there is none."""
    for target in TARGETS:
        if target.kind == kind.name:
            return target
    names = ", ".join(target.kind for target in TARGETS)
    raise UsageError(
        f"there is no description of {kind.name} for XLA's GPU compiler; there are {names}. Take the nearest, with "
        "--device-gib, or `plan --compiler cpu`"
    )
