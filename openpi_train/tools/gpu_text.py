"""Formats the account of a program compiled for GPUs as text. Read next: `planning/gpu/step_account.py`."""

from collections.abc import Sequence

from openpi_train.planning.forecast import Forecast, Machine
from openpi_train.planning.gpu.scopes import PHASES
from openpi_train.planning.gpu.step_account import (
    LATENCY_S,
    LAUNCH_S,
    MATMUL_SHARE,
    MEMORY_SHARE,
    GpuAccount,
    PartBound,
)
from openpi_train.planning.memory import Memory
from openpi_train.runtime.device_kinds import GIB
from openpi_train.tools.plan_text import table

# Parts of the model that take less than this share of the bound are shown as one.
_SMALL = 0.01


def lines(found: GpuAccount, chosen: Forecast) -> str:
    """The account beside the forecast: bytes, bound, the parts of the model by phase, buffers at the peak."""
    parts = [
        f"By XLA's GPU compiler, {found.num_devices} x {found.kind}, {found.compile_s:.0f} s: {chosen.words()}\n"
        + _memory(found, chosen),
        _bound(found),
        f"Milliseconds of the bound, by part of the model:\n{_parts(found)}",
    ]
    if found.buffers:
        parts.append(f"The largest buffers when memory is fullest:\n{_buffers(found)}")
    return "\n\n".join(parts)


def lines_alone(found: GpuAccount, machine: Machine) -> str:
    """As `lines`, of a program without a forecast."""
    verdict = "fits" if found.peak_bytes <= machine.usable_bytes else "does not fit"
    memory = (
        f"By XLA's GPU compiler, {found.num_devices} x {found.kind}, {found.compile_s:.0f} s: parameters and inputs "
        f"{found.state_bytes / GIB:.2f} GiB, the program's own {found.own_bytes / GIB:.2f}, together "
        f"{found.peak_bytes / GIB:.2f} of {machine.usable_bytes / GIB:.1f}: that {verdict}"
    )
    return "\n\n".join([memory, _bound(found), f"Milliseconds of the bound, by part of the model:\n{_parts(found)}"])


def comparison(accounts: Sequence[tuple[Forecast, GpuAccount]]) -> str:
    """All compiled candidates, in the plan's order, beside what was forecast of them."""
    columns = ["strategy", "over", "remat", "grad_accum", "GiB", "forecast", "bound ms", "of it products", "GB moved"]
    columns += ["kernels", "GB sent", "waited ms"]
    rows = [
        [
            *(one.layout.strategy, str(one.layout.fsdp_devices), one.policy.remat or "-", str(one.grad_accum)),
            *(f"{found.peak_bytes / GIB:.2f}", f"{(one.memory.state + one.memory.step) / GIB:.2f}"),
            *(_ms(found.bound_s), _ms(found.matmul_s), f"{found.moved_bytes / 1e9:.0f}", f"{found.kernels:,}"),
            *(f"{sum(found.sent_bytes.values()) / 1e9:.1f}", _ms(found.exposed_s)),
        ]
        for one, found in accounts
    ]
    return f"Bounds by the compiled programs (not measured):\n{table(columns, rows)}"


def _memory(found: GpuAccount, chosen: Forecast) -> str:
    memory, usable = chosen.memory, chosen.machine.usable_bytes
    host = f" and {found.host_bytes / GIB:.2f} in host memory" if found.host_bytes else ""
    verdict = "fits" if found.peak_bytes <= usable else "does not fit"
    return (
        f"state and batch {found.state_bytes / GIB:.2f} GiB{host} (forecast: state {memory.state / GIB:.2f}), the "
        f"program's own {found.own_bytes / GIB:.2f} (forecast: {memory.step / GIB:.2f}), together "
        f"{found.peak_bytes / GIB:.2f} (forecast: {(memory.state + memory.step) / GIB:.2f}) of {usable / GIB:.1f}: "
        f"that {verdict}{_between_steps(memory, usable)}"
    )


def _between_steps(memory: Memory, usable: int) -> str:
    """What the forecast's total has in place of a step's bytes, where that is more."""
    programs = {
        "to complete texts (--program reading, decoding)": memory.generation,
        "to act (--program acting)": memory.acting,
    }
    purpose, most = max(programs.items(), key=lambda item: item[1])
    if most <= memory.step:
        return ""
    verdict = "fits" if memory.total <= usable else "does not fit"
    return (
        f"\nBetween steps the run needs {memory.total / GIB:.2f} GiB by the forecast, {most / GIB:.2f} of them beside "
        f"the state {purpose}: that {verdict}"
    )


def _bound(found: GpuAccount) -> str:
    sent = ", ".join(f"{kind} {size / 1e9:.2f}" for kind, size in found.sent_bytes.items()) or "nothing"
    lines = [
        f"Bound by the compiled program (not measured): {1e3 * found.bound_s:.1f} ms of kernels, of them "
        f"{1e3 * found.matmul_s:.1f} ms products",
        f"  {found.kernels:,} kernels, {found.flops / 1e12:.2f} TFLOP in products, "
        f"{found.moved_bytes / 1e9:.1f} GB moved in device memory",
        f"  sent by a device, GB: {sent}; the schedule waits {1e3 * found.exposed_s:.1f} ms of "
        f"{1e3 * found.played_s:.1f} for transfers",
        f"  assumed: {MATMUL_SHARE:.0%} of the peak in products, {MEMORY_SHARE:.0%} of the memory's bandwidth, "
        f"{1e6 * LAUNCH_S:g} us per launch, {1e6 * LATENCY_S:g} us per transfer; nothing stays in the cache between "
        "kernels",
    ]
    if found.endless_loops:
        lines.append(f"  {found.endless_loops} loops of unknown length count once")
    return "\n".join(lines)


def _parts(found: GpuAccount) -> str:
    cells = {(one.part, one.phase): one.bound_s for one in found.parts}
    large = [one for one in found.by_part() if one.bound_s >= _SMALL * found.bound_s]
    small = [one for one in found.by_part() if one.bound_s < _SMALL * found.bound_s]
    rows = []
    for one in large:
        times = [cells.get((one.part, phase), 0.0) for phase in PHASES]
        rows.append([one.part, *map(_ms, (*times, one.bound_s)), *_sizes(one)])
    if small:
        times = [sum(cells.get((one.part, phase), 0.0) for one in small) for phase in PHASES]
        rows.append([f"({len(small)} more)", *map(_ms, (*times, sum(times))), "", "", ""])
    phases = {one.phase: one.bound_s for one in found.phases()}
    total = [phases.get(phase, 0.0) for phase in PHASES]
    sizes = [f"{found.flops / 1e12:.2f}", f"{found.moved_bytes / 1e9:.1f}", f"{found.kernels:,}"]
    rows.append(["all", *map(_ms, (*total, found.bound_s)), *sizes])
    return table(["part", *PHASES, "together", "TFLOP", "GB", "kernels"], rows)


def _sizes(one: PartBound) -> list[str]:
    return [f"{one.flops / 1e12:.2f}", f"{one.moved_bytes / 1e9:.1f}", f"{one.kernels:,}"]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}" if seconds else "0"


def _buffers(found: GpuAccount) -> str:
    rows = [[f"{one.num_bytes / GIB:.3f}", one.shape or "-", one.op_name or one.instruction] for one in found.buffers]
    return table(["GiB", "shape", "made by"], rows)
