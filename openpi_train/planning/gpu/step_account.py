"""The account of a program compiled for GPUs: bytes, kernels, FLOPs, traffic, and the least time that it can take.

The bound of a kernel is the longer of its products at `MATMUL_SHARE` of the peak and its traffic at `MEMORY_SHARE` of
the memory's bandwidth, plus its launch. How fast a kernel really is, nothing here knows: the bound says what cannot be
faster, and where the time goes at least. Read next: `kernels.py`, `schedule.py`, `buffers.py`.
"""

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from openpi_train.planning.forecast import LINK_SHARE, MEMORY_SHARE, Machine
from openpi_train.planning.gpu.buffers import buffers_at_peak
from openpi_train.planning.gpu.kernels import COPIED, KernelWork, is_kernel, kernel_work
from openpi_train.planning.gpu.schedule import Played, play
from openpi_train.planning.gpu.scopes import name_of, part_of, phase_of
from openpi_train.planning.gpu.targets import GpuTarget
from openpi_train.planning.hlo_text import HloInstruction, HloProgram, endless, read_hlo, runs
from openpi_train.planning.links import ring_flow
from openpi_train.planning.traffic import collective, collective_kind
from openpi_train.runtime.device_kinds import HOST_LINK_GB_S, product_rate

# Shares of the data sheet's figures that large products and large copies reach: an H100's 800 of 989 TFLOP/s and 3.0 of
# 3.35 TB/s.
MATMUL_SHARE = 0.81
# Seconds until a kernel runs, and until a transfer's first byte is sent.
LAUNCH_S, LATENCY_S = 2e-6, 10e-6
# How many buffers are named.
NUM_BUFFERS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartBound:
    """A part of the model in one phase of the step: its kernels of one step on one device, and their bound."""

    part: str
    phase: str
    kernels: int = 0
    flops: float = 0.0
    moved_bytes: float = 0.0
    bound_s: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeakBuffer:
    """A buffer alive at the peak of memory: its shape, and what makes it (of an argument, what it holds)."""

    num_bytes: int
    shape: str
    instruction: str
    op_name: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuAccount:
    """A compiled program on one of its devices. Bytes, seconds.

    `state_bytes` are the arguments, the batch among them, `own_bytes` the program's temporaries, `peak_bytes` both with
    the results that take no argument's place. `matmul_s` is the part of `bound_s` that products take at least.
    `played_s` is the schedule with transfers and with copies that run beside kernels, for which it waits `exposed_s`;
    such copies are no part of `bound_s`.
    """

    kind: str
    num_devices: int
    compile_s: float
    state_bytes: int
    host_bytes: int
    own_bytes: int
    peak_bytes: int
    buffers: Sequence[PeakBuffer]
    kernels: int
    flops: float
    moved_bytes: float
    matmul_s: float
    bound_s: float
    parts: Sequence[PartBound]
    sent_bytes: dict[str, float]
    played_s: float
    exposed_s: float
    host_copies_bytes: float
    libraries: dict[str, int]
    endless_loops: int

    def as_json(self) -> dict[str, Any]:
        """All figures, and the phases' sums."""
        return {**dataclasses.asdict(self), "phases": {one.phase: one.bound_s for one in self.phases()}}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "GpuAccount":
        """What `as_json` gave."""
        fields = {name: value[name] for name in (field.name for field in dataclasses.fields(cls))}
        parts = [PartBound(**part) for part in fields.pop("parts")]
        buffers = [PeakBuffer(**buffer) for buffer in fields.pop("buffers")]
        return cls(parts=parts, buffers=buffers, **fields)

    def phases(self) -> list[PartBound]:
        """The parts' sums per phase, longest first."""
        return summed(self.parts, lambda one: ("all", one.phase))

    def by_part(self) -> list[PartBound]:
        """The phases' sums per part, longest first."""
        return summed(self.parts, lambda one: (one.part, "all"))


def summed(parts: Iterable[PartBound], key: Any) -> list[PartBound]:
    """Sums of the parts with equal `key`, (part, phase), longest bound first."""
    found: dict[tuple[str, str], PartBound] = {}
    for one in parts:
        part, phase = key(one)
        old = found.get((part, phase), PartBound(part=part, phase=phase))
        found[part, phase] = dataclasses.replace(
            old,
            kernels=old.kernels + one.kernels,
            flops=old.flops + one.flops,
            moved_bytes=old.moved_bytes + one.moved_bytes,
            bound_s=old.bound_s + one.bound_s,
        )
    return sorted(found.values(), key=lambda one: -one.bound_s)


def account(compiled: Any, live: str | None, machine: Machine, target: GpuTarget, compile_s: float) -> GpuAccount:
    """The account of a program (`jax.stages.Compiled`) for the devices of `machine`.

    `live` is XLA's record of live ranges (`buffers.py`); None: no buffers are named.
    """
    program, memory = read_hlo(compiled.as_text()), compiled.memory_analysis()
    costs = StepCosts(program, machine, target)
    parts = costs.parts()
    played = costs.played()
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return GpuAccount(
        kind=target.kind,
        num_devices=machine.num_devices,
        compile_s=compile_s,
        state_bytes=memory.argument_size_in_bytes,
        host_bytes=memory.host_argument_size_in_bytes,
        own_bytes=memory.temp_size_in_bytes,
        peak_bytes=memory.argument_size_in_bytes + memory.temp_size_in_bytes + new,
        buffers=[] if live is None else named_buffers(program, live),
        kernels=sum(one.kernels for one in parts),
        flops=sum(one.flops for one in parts),
        moved_bytes=sum(one.moved_bytes for one in parts),
        matmul_s=costs.matmul_s(),
        bound_s=sum(one.bound_s for one in parts),
        parts=parts,
        sent_bytes=costs.sent_bytes(),
        played_s=played.total_s,
        exposed_s=played.exposed_s,
        host_copies_bytes=costs.host_copies_bytes(),
        libraries=costs.libraries(),
        endless_loops=len(endless(program)),
    )


def named_buffers(program: HloProgram, live: str) -> list[PeakBuffer]:
    """The largest buffers alive at the peak, by the names of the instructions that make them."""
    instructions = {name: one for body in program.computations.values() for name, one in body.items()}
    found = []
    for one in buffers_at_peak(live)[:NUM_BUFFERS]:
        instruction = instructions.get(one.instruction)
        shapes = [array for array in instruction.results if array.num_bytes == one.num_bytes] if instruction else []
        shape = f"{shapes[0].dtype}[{','.join(map(str, shapes[0].shape))}]" if shapes else ""
        op_name = _name(program, instruction) if instruction else ""
        found.append(PeakBuffer(num_bytes=one.num_bytes, shape=shape, instruction=one.instruction, op_name=op_name))
    return found


class StepCosts:
    """The cost of every kernel of a program on the devices of a machine; `runs` are those with how often they run."""

    def __init__(self, program: HloProgram, machine: Machine, target: GpuTarget):
        self._program, self._machine, self._target = program, machine, target
        self.runs = [run for run in runs(program) if not self._is_sent(run[1]) and is_kernel(run[1])]
        self._work = {(name, one.name): kernel_work(program, name, one) for name, one, _ in self.runs}

    def parts(self) -> list[PartBound]:
        """Every part of the model in every phase, longest bound first."""
        each = []
        for name, one, times in self.runs:
            work, op_name = self.work(name, one), _name(self._program, one)
            each.append(
                PartBound(
                    part=part_of(op_name),
                    phase=phase_of(op_name),
                    kernels=times,
                    flops=times * work.flops,
                    moved_bytes=times * work.moved,
                    bound_s=0.0 if one.opcode == COPIED else times * self.bound_s(work),
                )
            )
        return summed(each, lambda one: (one.part, one.phase))

    def work(self, computation: str, instruction: HloInstruction) -> KernelWork:
        """The work of one of `runs`."""
        return self._work[computation, instruction.name]

    def bound_s(self, work: KernelWork) -> float:
        """The least seconds of a kernel."""
        return max(self.product_s(work), work.moved / (MEMORY_SHARE * self._target.bandwidth)) + LAUNCH_S

    def product_s(self, work: KernelWork) -> float:
        """The least seconds of a kernel's products."""
        rate = product_rate(work.item_bytes) * self._machine.kind.peak_flops
        return work.flops / (MATMUL_SHARE * rate)

    def matmul_s(self) -> float:
        """The least seconds of all products."""
        return sum(times * self.product_s(self.work(name, one)) for name, one, times in self.runs)

    def sent_bytes(self) -> dict[str, float]:
        """Bytes that one device sends, by kind of collective."""
        sent: dict[str, float] = collections.defaultdict(float)
        for _, one, times in runs(self._program):
            if kind := collective_kind(one):
                sent[kind] += collective(one, self._machine.num_devices, times).sent_bytes
        return dict(sent)

    def played(self) -> Played:
        """The schedule, played."""

        def kernel_s(name: str, one: HloInstruction) -> float | None:
            work = self._work.get((name, one.name))
            return None if work is None else self.bound_s(work)

        def beside_s(name: str, one: HloInstruction) -> float | None:
            return kernel_s(name, one) if one.opcode == COPIED else self._transfer_s(one)

        return play(self._program, kernel_s, beside_s)

    def host_copies_bytes(self) -> float:
        """Bytes that are copied from and to the host's memory."""
        copies = (run for run in runs(self._program) if run[1].opcode == "copy-start")
        return sum(times * one.results[0].num_bytes for _, one, times in copies if _reaches_host(one))

    def libraries(self) -> dict[str, int]:
        """How many calls of libraries the program's text has, by name."""
        calls = (one for body in self._program.computations.values() for one in body.values())
        names = (one.text("custom_call_target").strip('"') for one in calls if one.opcode == "custom-call")
        return dict(collections.Counter(names).most_common())

    def _transfer_s(self, one: HloInstruction) -> float | None:
        """Seconds of the transfer that an instruction starts; None if it starts none."""
        if one.opcode == "async-start":
            inner = [inner for called in one.called for inner in self._program.computations[called].values()]
            return next((self._transfer_s(each) for each in inner if collective_kind(each)), None)
        if one.opcode == "copy-start" and _reaches_host(one):
            return LATENCY_S + one.results[0].num_bytes / (HOST_LINK_GB_S * 1e9)
        if not collective_kind(one):
            return None
        num_devices, per_host = self._machine.num_devices, self._machine.devices_per_host
        flow = ring_flow(one.groups(num_devices).tolist(), collective(one, num_devices).sent_bytes, per_host)
        rates = self._machine.kind.link_gb_s * LINK_SHARE, self._machine.network_gb_s * LINK_SHARE
        return LATENCY_S + flow.seconds(*rates)

    def _is_sent(self, one: HloInstruction) -> bool:
        return self._transfer_s(one) is not None


def _reaches_host(one: HloInstruction) -> bool:
    return any(array.on_host for array in one.results)


def _name(program: HloProgram, instruction: HloInstruction) -> str:
    body = program.computations.get(instruction.called[0]) if instruction.opcode == "fusion" else None
    return name_of(instruction, body)
