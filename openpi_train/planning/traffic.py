"""Traffic between devices in one step: read from the compiled program, and by the strategy's formula.

Bytes sent by one device with ring algorithms (Thakur et al. 2005): an all-gather or reduce-scatter of a whole array of
W bytes among n devices sends W (n - 1) / n, an all-reduce twice that. Read next: `parallel/devices.py`, which sends.
"""

import dataclasses
import math
from collections.abc import Container, Iterator, Sequence

import numpy as np
from jax.extend.core import Jaxpr

from openpi_train.parallel.mesh import FSDP, REPLICA, TENSOR
from openpi_train.parallel.params import ParamLeaves
from openpi_train.parallel.strategy import Plan
from openpi_train.planning.hlo_text import HloArray, HloInstruction, endless, read_hlo, runs
from openpi_train.planning.jaxprs import SizeOf, bodies, turns

# jax's names of collectives in a traced program.
_KIND_OF = {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter"}
_KIND_OF |= {"psum": "all-reduce", "psum_invariant": "all-reduce"}
_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective operation of a compiled program: its output on one device, and how often it runs."""

    kind: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    group_size: int
    times: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first array."""
        return self.arrays[0][1]

    @property
    def sent_bytes(self) -> float:
        """Bytes that one device sends in all runs together."""
        result = sum(HloArray(dtype, shape).num_bytes for dtype, shape in self.arrays)
        others = self.group_size - 1
        per_result_byte = {
            "all-gather": others / self.group_size,
            "all-reduce": 2 * others / self.group_size,
            "reduce-scatter": float(others),
        }
        return self.times * result * per_result_byte.get(self.kind, float(others > 0))


def collectives(hlo: str, num_devices: int) -> list[Collective]:
    """All collectives of an optimized HLO module's text, with the trip counts of the enclosing loops.

    Raises ValueError for a loop around a collective whose trip count the compiler does not know.
    """
    program = read_hlo(hlo)
    for loop in endless(program):
        for _, inner, _ in (run for name in loop.called for run in runs(program, name)):
            if collective_kind(inner):
                raise ValueError(f"the compiler does not know how often the loop around {inner.name} runs")
    return [
        collective(instruction, num_devices, times)
        for _, instruction, times in runs(program)
        if collective_kind(instruction)
    ]


def collective_kind(instruction: HloInstruction) -> str | None:
    """Its kind, if this instruction is a collective or starts one."""
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in _KINDS else None


def collective(instruction: HloInstruction, num_devices: int, times: int = 1) -> Collective:
    """The collective that this instruction is, or starts; it runs so many times."""
    arrays = tuple((array.dtype, array.shape) for array in _outputs(instruction))
    kind = collective_kind(instruction)
    assert kind is not None, instruction
    return Collective(kind, arrays, instruction.groups(num_devices).shape[-1], times)


def formula_bytes(plan: Plan, params: ParamLeaves, itemsize: int, num_micros: int = 1) -> float:
    """Bytes that a step with these trainable parameters (or their shapes) must send under the plan's strategy.

    Gradients are of the plan's `reduce_dtype`, gathered parameters `itemsize` bytes wide (ZeRO: Rajbhandari et al.
    2020, section 7). Devices of a tensor group send different parameters; the traffic inside the group is
    `tensor_bytes`.
    """
    return sum(formula_by_axes(plan, params, itemsize, num_micros).values())


def formula_by_axes(
    plan: Plan,
    params: ParamLeaves,
    itemsize: int,
    num_micros: int = 1,
    at_once: Container[str] = (),
    fixed: ParamLeaves | None = None,
) -> dict[tuple[str, ...], float]:
    """`formula_bytes` by the mesh axes along which the bytes are sent.

    Parameters in `at_once` are whole before their module runs: gathered in float32, and once per micro-batch, where
    layers that are gathered when they run are gathered for the backward pass again. `fixed` ones have no gradients.
    """
    shards, replicas = plan.mesh.shape[FSDP], plan.mesh.shape[REPLICA]
    cut, whole = _sizes(plan, params)
    early, _ = _sizes(plan, {path: leaf for path, leaf in params.items() if path in at_once})
    gathers = 2 * num_micros if plan.cuts("copy") else 1
    gathered = gathers * itemsize * (cut - early) + (num_micros if plan.cuts("copy") else 1) * 4 * early
    gathered += gathers * itemsize * _sizes(plan, fixed or {})[0]
    scatters = num_micros if plan.cuts("grads") else 1
    summed = np.dtype(plan.reduce_dtype).itemsize
    return {
        (FSDP,): _share(shards) * (gathered + scatters * summed * cut),
        (REPLICA,): _share(replicas) * 2 * summed * cut / shards,
        (REPLICA, FSDP): _share(shards * replicas) * 2 * summed * whole,
    }


def bytes_beside(
    plan: Plan,
    params: ParamLeaves,
    itemsize: int,
    num_micros: int = 1,
    at_once: Container[str] = (),
    fixed: ParamLeaves | None = None,
    *,
    unrolled: bool = False,
) -> float:
    """The part of `formula_bytes` that is sent layer by layer, beside the products of other layers: gathers if layers
    are gathered when they run, and gradients if they are sharded as they arise (`parallel/devices.py`).

    `fixed` parameters have no gradients. `unrolled`: layers are not in a loop, and then do both with one micro-batch,
    whatever the strategy cuts.
    """
    by_layer = unrolled and num_micros == 1
    weights = 2 * num_micros if plan.cuts("copy") else by_layer
    gradients = num_micros if plan.cuts("grads") else by_layer
    trained, others = (
        _sizes(plan, {path: leaf for path, leaf in leaves.items() if path not in at_once})[0]
        for leaves in (params, fixed or {})
    )
    sent = weights * itemsize * (trained + others) + gradients * np.dtype(plan.reduce_dtype).itemsize * trained
    return _share(plan.mesh.shape[FSDP]) * sent


def _sizes(plan: Plan, leaves: ParamLeaves) -> tuple[float, float]:
    """The elements of the parameters that the plan shards, and of the others, of one device of a tensor group."""
    cut = whole = 0.0
    for path, leaf in leaves.items():
        spec = plan.spec("state", leaf, path)
        size = math.prod(leaf.shape) / (plan.mesh.shape[TENSOR] if TENSOR in spec else 1)
        cut, whole = (cut + size, whole) if FSDP in spec else (cut, whole + size)
    return cut, whole


def tensor_bytes(plan: Plan, summed_bytes_per_row: float, rows: float) -> float:
    """Bytes that a device sends to its tensor group in a step: all-reduces of activations, for its `rows`."""
    return 2 * _share(plan.mesh.shape[TENSOR]) * summed_bytes_per_row * rows


def summed_bytes(jaxpr: Jaxpr, axis: str, size_of: SizeOf) -> float:
    """Bytes, by `size_of`, that a traced program sums over the mesh axis `axis`, times the iterations of loops."""
    total = 0.0
    for equation in jaxpr.eqns:
        if _KIND_OF.get(equation.primitive.name) == "all-reduce" and axis in equation.params["axes"]:
            total += sum(size_of(var.aval) for var in equation.outvars)
        total += turns(equation) * sum(summed_bytes(body, axis, size_of) for body in bodies(equation))
    return total


def as_asked(found: Sequence[Collective], jaxpr: Jaxpr) -> list[Collective]:
    """The collectives in the dtypes of the traced program: XLA for CPUs sends bfloat16 as float32."""
    asked = {(_KIND_OF.get(name), shape) for name, dtype, shape in _asked(jaxpr) if dtype == "bfloat16"}

    def narrow(one: Collective) -> Collective:
        arrays = tuple(
            ("bf16" if dtype == "f32" and (one.kind, shape) in asked else dtype, shape) for dtype, shape in one.arrays
        )
        return dataclasses.replace(one, arrays=arrays)

    return [narrow(one) for one in found]


def _asked(jaxpr: Jaxpr) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, type and shape of every operation's first result, in a jaxpr and all nested ones."""
    for equation in jaxpr.eqns:
        if equation.outvars:
            aval = equation.outvars[0].aval
            yield equation.primitive.name, str(getattr(aval, "dtype", "")), tuple(getattr(aval, "shape", ()))
        for body in bodies(equation):
            yield from _asked(body)


def _share(devices: int) -> float:
    return (devices - 1) / devices


def _outputs(instruction: HloInstruction) -> tuple[HloArray, ...]:
    """The output arrays. Asynchronous start operations list their inputs first, an all-reduce's before jaxlib 0.12 do
    not."""
    arrays = instruction.results
    if not instruction.opcode.endswith("-start") or len(arrays) == len(instruction.operands):
        return arrays
    arrays = tuple(array for array in arrays if array != HloArray("u32", ()))  # a collective-permute's own counters
    return arrays[len(arrays) // 2 :]
