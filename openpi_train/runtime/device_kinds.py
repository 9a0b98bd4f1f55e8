"""Kinds of devices: memory, peak FLOP/s and links, for local devices and for plans.

Read next: `device_limits.py` (what the local devices report), `planning/links.py` (traffic over the links).
"""

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from openpi_train.runtime.exits import UsageError

GIB = 2**30
# Rate at which a device reads host memory while writing at the same rate, GB/s: PCIe 4.0 x16, 31.5 nominal.
HOST_LINK_GB_S = 25


@runtime_checkable
class KnownDevice(Protocol):
    """What a program is compiled for: a device of jax, one that need not be there, or a `DeviceKind`."""

    @property
    def platform(self) -> str: ...
    @property
    def device_kind(self) -> str: ...


@runtime_checkable
class JaxDevice(KnownDevice, Protocol):
    """The part of a `jax.Device` that is used; jax does not declare its type."""

    @property
    def id(self) -> int: ...
    @property
    def process_index(self) -> int: ...
    @property
    def local_hardware_id(self) -> int | None: ...
    def memory_stats(self) -> Mapping[str, int] | None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """A kind of device. `reported` is a pattern for whole words of jax's `device_kind`.

    `peak_tflops` is the dense bfloat16 peak with float32 sums, `memory_gb_s` what one device reads from its memory at
    most, `link_gb_s` what it sends at most, GB/s. `compute_capability` is CUDA's, as jax's devices have it.
    """

    name: str
    reported: str
    compute_capability: str
    memory_gib: float
    memory_gb_s: float
    peak_tflops: float
    link: str
    link_gb_s: float
    source: str

    @property
    def peak_flops(self) -> float:
        """Dense bfloat16 FLOP/s."""
        return self.peak_tflops * 1e12

    @property
    def platform(self) -> str:
        """As a jax device has it, which asks no more than this, `compute_capability` and `device_kind`."""
        return "cuda" if self.is_known else "cpu"

    @property
    def device_kind(self) -> str:
        """The name, as a jax device has it."""
        return self.name.upper()

    @property
    def is_known(self) -> bool:
        """Whether times can be forecast for it."""
        return self is not UNKNOWN


def _kind(
    name: str,
    reported: str,
    compute_capability: str,
    memory: tuple[float, float],
    peak_tflops: float,
    link: tuple[str, float],
    source: str,
) -> DeviceKind:
    return DeviceKind(
        name=name,
        reported=reported,
        compute_capability=compute_capability,
        memory_gib=memory[0],
        memory_gb_s=memory[1],
        peak_tflops=peak_tflops,
        link=link[0],
        link_gb_s=link[1],
        source=source,
    )


# One direction, half of what data sheets add up (NVLink 5: 1800 GB/s both ways, 4: 900, 3: 600); PCI Express base
# specifications 4.0 and 5.0 with 16 lanes.
_NVLINK_5, _NVLINK_4, _NVLINK_3 = ("NVLink 5", 900.0), ("NVLink 4", 450.0), ("NVLink 3", 300.0)
_PCIE_5, _PCIE_4 = ("PCIe 5.0 x16", 63.0), ("PCIe 4.0 x16", 31.5)

# Memory is the total that nvidia-smi shows, a little less than the nominal size, and its rate. Rates, peaks and links
# are NVIDIA's, from the named document; if it gives peaks with sparsity, half of that. Compute capabilities are those
# of developer.nvidia.com/cuda-gpus. The first matching row counts.
# Bridges between pairs of cards (H100 NVL, A6000, 3090) are not counted: a ring over more than two goes through PCIe.
KINDS = (
    _kind("b200", r"G?B200", "10.0", (179.0, 8000), 2250, _NVLINK_5, "HGX B200 data sheet"),
    _kind("gh200", r"GH200", "9.0", (95.6, 4000), 989, _NVLINK_4, "GH200 Grace Hopper Superchip data sheet"),
    _kind("h200", r"H200", "9.0", (140.4, 4800), 989, _NVLINK_4, "H200 Tensor Core GPU data sheet"),
    _kind("h100-nvl", r"H100.*NVL", "9.0", (93.6, 3900), 835, _PCIE_5, "H100 NVL GPU product brief"),
    _kind("h100-pcie", r"H100.*PCIe", "9.0", (79.6, 2000), 756, _PCIE_5, "H100 Tensor Core GPU data sheet"),
    _kind("h100", r"H100", "9.0", (79.6, 3350), 989, _NVLINK_4, "H100 Tensor Core GPU data sheet"),
    _kind("a100-pcie", r"A100.*80GB.*PCIe", "8.0", (80.0, 1935), 312, _PCIE_4, "A100 80GB PCIe product brief"),
    _kind("a100-40gb", r"A100.*40GB", "8.0", (40.0, 1555), 312, _NVLINK_3, "A100 Tensor Core GPU data sheet"),
    _kind("a100", r"A100", "8.0", (80.0, 2039), 312, _NVLINK_3, "A100 Tensor Core GPU data sheet (1758950)"),
    _kind("l40s", r"L40S", "8.9", (45.0, 864), 362, _PCIE_4, "L40S data sheet"),
    _kind("a40", r"A40", "8.6", (45.0, 696), 150, _PCIE_4, "A40 data sheet"),
    _kind("rtx6000-ada", r"RTX 6000 Ada", "8.9", (48.0, 960), 364, _PCIE_4, "RTX 6000 Ada Generation data sheet"),
    _kind("a6000", r"A6000", "8.6", (48.0, 768), 155, _PCIE_4, "RTX A6000 data sheet"),
    _kind("rtx5090", r"(RTX)?5090", "12.0", (31.8, 1792), 210, _PCIE_5, "RTX Blackwell GPU Architecture, appendix"),
    _kind("rtx4090", r"(RTX)?4090", "8.9", (24.0, 1008), 165, _PCIE_4, "Ada GPU Architecture v2, appendix A"),
    _kind("rtx3090", r"(RTX)?3090", "8.6", (24.0, 936), 71, _PCIE_4, "Ampere GA102 GPU Architecture v2, table 2"),
)

# All others (such as a CPU): assumed to have an H100's ratio of compute to bandwidth, so that candidates can be
# compared.
UNKNOWN = _kind("unknown", "", "", (0.0, 3350), 989, _NVLINK_4, "none")


# The rate of products by the bytes of an element, as a share of that of bfloat16. XLA computes those of float32 in
# TensorFloat-32 by default: half of it, in all data sheets above.
_PRODUCT_RATE = {1.0: 2.0, 2.0: 1.0, 4.0: 0.5}
_SLOW_RATE = 1 / 16  # float64, without tensor cores on most kinds


def product_rate(item_bytes: float) -> float:
    """The rate of products of elements of so many bytes, as a share of the bfloat16 peak."""
    return _PRODUCT_RATE.get(item_bytes, _SLOW_RATE)


def kind_of(device_kind: str) -> DeviceKind:
    """The kind with this `device_kind` in jax, or `UNKNOWN`."""
    return next((kind for kind in KINDS if re.search(rf"\b{kind.reported}\b", device_kind, re.IGNORECASE)), UNKNOWN)


def find_kind(text: str, choices: Sequence[DeviceKind] = KINDS) -> DeviceKind:
    """The kind that `text` names, ignoring case, spaces and dashes; names that the driver reports also work.

    Raises UsageError for any other, with the closest name and the names of `choices`, which it does not limit.
    """
    by_plain = {_plain(kind.name): kind for kind in KINDS}
    kind = by_plain.get(_plain(text), kind_of(text))
    if kind.is_known:
        return kind
    close = difflib.get_close_matches(_plain(text), [_plain(kind.name) for kind in choices], 1)
    guess = f"; did you mean {by_plain[close[0]].name}?" if close else "."
    names = ", ".join(kind.name for kind in choices)
    raise UsageError(
        f"--device-kind {text!r} is unknown{guess} Kinds: {names}. For another take the nearest, with --device-gib"
    )


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())
