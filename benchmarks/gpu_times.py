"""What a GPU reaches, measured: products and copies, and from a trace the time of each part beside its bound.

Read next: `gpu_steps.py`.
"""

import collections
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.report import Cell, Spread, Table
from openpi_train.planning.forecast import Machine
from openpi_train.planning.gpu.scopes import name_of, part_of, phase_of
from openpi_train.planning.gpu.step_account import StepCosts
from openpi_train.planning.gpu.targets import has_target, target_of
from openpi_train.planning.hlo_text import HloProgram, read_hlo
from openpi_train.runtime.device_kinds import kind_of

# Edges of the product, and elements of the copy; each is repeated inside one program.
EDGE, COPIED, TIMES, SAMPLES = 8192, 2**30, 10, 5
PARTS = ("part", "phase", "kernels", "measured ms", "bound ms", "measured / bound", "lost ms")
# Parts that lose less than this, in milliseconds of a step, are shown as one.
_LITTLE_MS = 0.5


def ceilings() -> Table:
    """bfloat16 products and copies as jax makes them, beside the data sheet of the device."""
    kind = kind_of(jax.devices()[0].device_kind)
    left, right = (jax.random.normal(jax.random.key(seed), (EDGE, EDGE), jnp.bfloat16) / EDGE**0.5 for seed in (0, 1))

    @jax.jit
    def products(x: Any, y: Any) -> Any:
        return jax.lax.fori_loop(0, TIMES, lambda _, x: x @ y, x)

    whole = jnp.ones(COPIED, jnp.bfloat16)

    @jax.jit
    def copies(x: Any) -> Any:
        return jax.lax.fori_loop(0, TIMES, lambda n, x: x + n.astype(x.dtype), x)

    flops = _timed(lambda: products(left, right)).map(lambda seconds: 2e-12 * EDGE**3 * TIMES / seconds)
    moved = _timed(lambda: copies(whole)).map(lambda seconds: 1e-9 * 2 * 2 * COPIED * TIMES / seconds)
    rows: list[list[Cell]] = [
        [f"products of {EDGE} x {EDGE}, TFLOP/s", flops, kind.peak_flops / 1e12, flops.median * 1e12 / kind.peak_flops],
        ["reading and writing 2 GB, GB/s", moved, kind.memory_gb_s, moved.median / kind.memory_gb_s],
    ]
    return Table(f"What {jax.devices()[0].device_kind} reaches", ("", "measured", "data sheet", "share"), rows)


def _timed(function: Any) -> Spread:
    jax.block_until_ready(function())
    samples = []
    for _ in range(SAMPLES):
        began = time.perf_counter()
        jax.block_until_ready(function())
        samples.append(time.perf_counter() - began)
    return Spread(tuple(samples))


def by_part(kernels: Iterable[tuple[str, float]], hlo: str, machine: Machine, num_steps: int, name: str) -> Table:
    """The kernels of `num_steps` traced steps by part of the model and phase, those that lose most first.

    Args:
        kernels: from `kernel_times`.
        hlo: the text of the program that ran.
    """
    program = read_hlo(hlo)
    bounds = _bounds(program, machine) if has_target(machine.kind) else {}
    labels = _labels(program)
    measured: dict[tuple[str, str], list[float]] = collections.defaultdict(lambda: [0, 0.0])
    for instruction, seconds in kernels:
        found = measured[labels.get(instruction, ("not in the program", ""))]
        found[0] += 1
        found[1] += seconds
    rows: list[list[Cell]] = []
    rest = [0.0, 0.0, 0.0]
    for key in {*measured, *bounds}:
        count, seconds = measured.get(key, (0, 0.0))
        taken, least = 1e3 * seconds / num_steps, 1e3 * bounds.get(key, 0.0)
        if max(taken, least) < _LITTLE_MS:
            rest = [rest[0] + count / num_steps, rest[1] + taken, rest[2] + least]
            continue
        rows.append([*key, count / num_steps, taken, least, taken / least if least else None, taken - least])
    rows.sort(key=lambda row: -float(row[-1]))  # pyright: ignore[reportArgumentType]
    rows.append(["the others", "", *rest, rest[1] / rest[2] if rest[2] else None, rest[1] - rest[2]])
    totals = [sum(float(row[place]) for row in rows) for place in (2, 3, 4)]  # pyright: ignore[reportArgumentType]
    rows.append(["all", "", *totals, totals[1] / totals[2] if totals[2] else None, totals[1] - totals[2]])
    return Table(f"Kernels in {num_steps} traced steps, per step: {name}", PARTS, rows)


def kernel_times(trace: Path) -> Iterator[tuple[str, float]]:
    """The instruction (empty if the trace does not tell) and the seconds of every kernel on the first GPU.

    Args:
        trace: an `.xplane.pb`.
    """
    for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
        if not plane.name.startswith("/device:GPU:0"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                facts = dict(event.stats)
                yield str(facts.get("hlo_op") or ""), 1e-9 * event.duration_ns


def _labels(program: HloProgram) -> dict[str, tuple[str, str]]:
    """Part and phase of every instruction."""
    found = {}
    for body in program.computations.values():
        for one in body.values():
            inside = program.computations.get(one.called[0]) if one.opcode == "fusion" else None
            name = name_of(one, inside)
            found[one.name] = part_of(name), phase_of(name)
    return found


def _bounds(program: HloProgram, machine: Machine) -> dict[tuple[str, str], float]:
    """The least seconds of a step's kernels by part and phase."""
    parts = StepCosts(program, machine, target_of(machine.kind)).parts()
    return {(one.part, one.phase): one.bound_s for one in parts}
