"""The `plan` verb: forecast the memory and speed of an experiment on any devices.

State is exact (abstract evaluation), FLOPs are counted in the traced step, activations are estimated from it, traffic
follows the strategies' formulas over the links. XLA's GPU compiler, where it is installed, says whether the recommended
candidate fits; else the next one is recommended, as a run takes it.
Nothing is allocated. Read next: `planning/forecast.py`, `compiled_memory.py`, `plan_text.py`.
"""

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from openpi_train.experiment import Experiment
from openpi_train.nn.attention import best_kind
from openpi_train.planning.forecast import LINK_SHARE, Forecast, Machine, instead, recommend
from openpi_train.planning.gpu import plugin
from openpi_train.planning.gpu.step_account import GpuAccount
from openpi_train.planning.gpu.targets import KINDS_OF_TARGETS, has_target, target_of
from openpi_train.planning.iteration import DECODING_MEMORY_SHARE, Iteration, forecast_iteration
from openpi_train.planning.simulators import Simulators, simulators_of
from openpi_train.runtime.device_kinds import GIB, HOST_LINK_GB_S, KINDS, DeviceKind, find_kind, product_rate
from openpi_train.runtime.device_limits import CLIENT_SHARE
from openpi_train.runtime.exits import DONE, USAGE, UsageError
from openpi_train.tools import compiled_memory, gpu_programs, gpu_step, gpu_text, plan_text
from openpi_train.training.settling import Settling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """A plan: all candidates in table order, the recommended one (None if none fits) and why."""

    experiment: Experiment
    machine: Machine
    num_params: int
    num_frozen: int
    model_flops_per_row: float
    forecasts: Sequence[Forecast]
    recommended: Forecast | None
    # Of the recommended one, or else the first; None of a run that makes no rollouts of its own.
    iteration: Iteration | None
    simulators: Sequence[Simulators]
    why: str
    assumptions: Sequence[str]


def main(
    experiment: Experiment,
    *,
    num_devices: int,
    device_kind: str,
    num_hosts: int,
    device_gib: float | None,
    network_gb_s: float,
    efficiency: float,
    compiler: str | None,
    compile_all: bool,
    words: Sequence[str],
    as_text: bool,
) -> int:
    """Print the plan. Returns 0, or 2 if nothing fits. Call it before jax starts.

    `compiler` is "auto" (the one for GPUs where it is installed), "cpu" or "gpu", or None: nothing is compiled. `words`
    name the experiment with its flags, for the process that compiles for GPUs. Raises UsageError for conflicting flags.
    """
    kinds = KINDS_OF_TARGETS if compiler == "gpu" or compile_all else KINDS
    machine = find_machine(device_kind, num_devices, num_hosts, device_gib, network_gb_s, efficiency, kinds)
    asked, compiler = compiler, _compiler(compiler, compile_all, machine, experiment)
    compiled_memory.imitate(num_devices, experiment.sharding.tensor_devices)
    report = make_report(experiment, machine)
    if as_text:
        print(plan_text.tables(report, words), flush=True)
    compiled, accounts, chosen = None, [], report.recommended
    if compiler == "cpu" and chosen is not None:
        compiled = compiled_memory.compile_step(report.experiment, chosen)
        if as_text:
            print("\n" + plan_text.compiled(compiled, chosen))
    if compiler == "gpu" and chosen is not None:
        machine_flags = ["--devices", num_devices, "--device-kind", machine.kind.name, "--hosts", num_hosts]
        machine_flags += ["--device-gib", machine.available_bytes / CLIENT_SHARE / GIB, "--network-gb-s", network_gb_s]
        flags = [*map(str, machine_flags)]

        def compile_one(one: Forecast) -> GpuAccount:
            return gpu_step.compile_candidate([*words, *plan_text.flags(experiment, one)], one, flags)

        report, accounts = _judged(report, compile_one, words, compile_all=compile_all, as_text=as_text)
    if as_text and asked == "auto" and chosen is not None and (unasked := _why_unasked(compiler, machine, experiment)):
        print(f"\nThe compiler was not asked: {unasked}")
    if not as_text:
        print(json.dumps(_as_json(report, compiled, accounts), indent=1))
    return DONE if chosen is not None else USAGE


def _judged(
    report: Report,
    compile_one: Callable[[Forecast], GpuAccount],
    words: Sequence[str],
    *,
    compile_all: bool,
    as_text: bool,
) -> tuple[Report, list[tuple[Forecast, GpuAccount]]]:
    """All candidates that fit by the estimate, compiled for GPUs; or the recommended one, and as long as that does not
    fit, the next, as a run takes it. The report then recommends that one."""
    accounts: list[tuple[Forecast, GpuAccount]] = []
    assert report.recommended is not None
    open_ones = [one for one in report.forecasts if one.fits] if compile_all else [report.recommended]
    while open_ones:
        one, *open_ones = open_ones
        account = compile_one(one)
        accounts.append((one, account))
        if as_text:
            print("\n" + gpu_text.lines(account, one), flush=True)
        if compile_all or account.peak_bytes <= report.machine.usable_bytes:
            continue
        if other := instead(report.forecasts, one, account.peak_bytes):
            open_ones = [other]
            why = f"{other.words()}, as {one.words()} needs {account.peak_bytes / GIB:.1f} GiB by the compiler"
            report = dataclasses.replace(report, recommended=other, why=why)
            if as_text:
                print(f"\nRecommended instead: {why}\n\n{plan_text.command(words, report.experiment, other)}")
    if as_text and len(accounts) > 1:
        print("\n" + gpu_text.comparison(accounts))
    return report, accounts


def _compiler(asked: str | None, compile_all: bool, machine: Machine, experiment: Experiment) -> str | None:
    """The compiler to use. Raises UsageError if the one for GPUs is asked for and cannot be used."""
    problem = gpu_programs.why_not("step", experiment)
    if asked == "gpu" or compile_all:
        if problem:
            raise UsageError(problem)
        target_of(machine.kind)
        plugin.require()
        return "gpu"
    if asked == "auto":
        return None if problem or not plugin.is_installed() or not has_target(machine.kind) else "gpu"
    return asked


def _why_unasked(compiler: str | None, machine: Machine, experiment: Experiment) -> str | None:
    """Why "auto" means no compiler here; None if it means one."""
    if compiler is not None:
        return None
    if problem := gpu_programs.why_not("step", experiment):
        return problem
    if not has_target(machine.kind):
        return f"there is no description of {machine.kind.name} for it"
    return plugin.how_to_install()


def find_machine(
    device_kind: str,
    num_devices: int,
    num_hosts: int,
    device_gib: float | None,
    network_gb_s: float,
    efficiency: float = 0.5,
    kinds: Sequence[DeviceKind] = KINDS,
) -> Machine:
    """The machine that the flags describe. Raises UsageError for invalid flags; of an unknown kind it names `kinds`."""
    kind = find_kind(device_kind, kinds)
    if num_devices % num_hosts:
        raise UsageError(f"--hosts {num_hosts} does not divide --devices {num_devices}: all hosts have as many devices")
    memory_gib = kind.memory_gib if device_gib is None else device_gib
    for flag, value in (("--device-gib", memory_gib), ("--network-gb-s", network_gb_s)):
        if not 0 < value < math.inf:
            raise UsageError(f"{flag} {value:g} must be above 0")
    if not 0 < efficiency <= 1:
        raise UsageError(f"--efficiency {efficiency:g} must lie in (0, 1]: it is a share of the peak")
    return Machine(
        kind=kind,
        num_devices=num_devices,
        num_hosts=num_hosts,
        available_bytes=int(CLIENT_SHARE * memory_gib * GIB),
        network_gb_s=network_gb_s,
        efficiency=efficiency,
    )


def make_report(experiment: Experiment, machine: Machine) -> Report:
    """The part of the plan that needs no compiler. Raises UsageError for conflicting flags."""
    settling = Settling(given=experiment, machine=machine, opens_accumulation=True)
    experiment, layout = settling.fitted, settling.layout
    # Attention by cuDNN is traced for the planned devices.
    with plugin.pretended(machine.kind) if machine.kind.is_known else contextlib.nullcontext():
        found = settling.forecasts
    chosen, why = recommend(found)
    one = chosen or found[0]
    return Report(
        experiment=experiment,
        machine=machine,
        num_params=sum(leaf.size for leaf in layout.shapes.params.values()),
        num_frozen=sum(leaf.size for leaf in layout.shapes.frozen.values()),
        model_flops_per_row=found[0].policy.model_flops_per_row,
        forecasts=found,
        recommended=chosen,
        iteration=None if one.layout.rl is None else forecast_iteration(one.layout.rl, one),
        simulators=simulators_of(experiment, machine.num_devices // machine.num_hosts),
        why=why,
        assumptions=_assumptions(experiment, machine),
    )


# How XLA computes products of a type on GPUs.
_PRODUCTS = {"float32": "TensorFloat-32"}


def _assumptions(experiment: Experiment, machine: Machine) -> list[str]:
    kind, sharding, dtype = machine.kind, experiment.sharding, jnp.dtype(experiment.model.compute.dtype)
    peak = kind.peak_tflops * product_rate(dtype.itemsize)
    lines = [
        f"{kind.name}: {machine.available_bytes / CLIENT_SHARE / GIB:.1f} GiB, of which jax may take "
        f"{CLIENT_SHARE:.0%}; a tenth of that is kept free as workspace (allocator, collectives, gathered layers)",
        f"peak {peak:g} TFLOP/s dense {_PRODUCTS.get(dtype.name, dtype.name)} "
        f"({kind.source}), {machine.efficiency:.0%} of it while computing, recomputation included (--efficiency)",
        f"{kind.link}: {kind.link_gb_s:g} GB/s out of a device, {LINK_SHARE:.0%} of it reached",
    ]
    if machine.num_hosts > 1:
        lines.append(f"network: {machine.network_gb_s:g} GB/s out of a host (--network-gb-s), {LINK_SHARE:.0%} reached")
    if best_kind(experiment.model.compute.open_heads, dtype, kind) == "cudnn":
        lines.append("attention by cuDNN, if a run finds it right on its devices (--model.attention auto)")
    if sharding.tensor_devices > 1:
        lines.append("what tensor groups sum: counted in the traced step")
    if sharding.offload != "none":
        lines.append(f"host memory: {HOST_LINK_GB_S} GB/s each way (PCIe 4.0 x16), beside nothing but the update")
    if experiment.rl is not None:
        lines.append(
            f"own rollouts: as long as is allowed; parameters and cache are read at {DECODING_MEMORY_SHARE:.0%} of "
            f"{kind.memory_gb_s:g} GB/s to make a token; simulators and reward functions take no time"
        )
    return [
        *lines,
        "memory: an estimate, within a quarter; XLA's GPU compiler, which needs no GPU, says what a step takes "
        "(--compiler gpu), and a run takes the next candidate where its own compiled step does not fit",
        "the data keep up; rings in the mesh's order; step s: products hide part of what layers send; overlapped: all",
    ]


def _as_json(
    report: Report, compiled: compiled_memory.Compiled | None, accounts: Sequence[tuple[Forecast, GpuAccount]]
) -> dict[str, Any]:
    machine, chosen = report.machine, report.recommended
    return {
        "experiment": report.experiment.name,
        "batch_size": report.experiment.batch_size,
        "cameras": list(report.experiment.data.cameras),
        "parameters": report.num_params,
        "frozen_parameters": report.num_frozen,
        "model_flops_per_sample": report.model_flops_per_row,
        "machine": {
            **dataclasses.asdict(machine),
            "peak_flops": machine.kind.peak_flops * report.forecasts[0].policy.product_rate,
            "available_bytes": machine.available_bytes,
            "usable_bytes": machine.usable_bytes,
            "link_share": LINK_SHARE,
        },
        "assumptions": list(report.assumptions),
        "candidates": [one.as_json() for one in report.forecasts],
        "recommendation": {
            "why": report.why,
            "flags": plan_text.flags(report.experiment, chosen) if chosen else None,
            **({"candidate": chosen.as_json()} if chosen else {}),
        },
        "iteration": report.iteration.as_json() if report.iteration else None,
        "simulators": [one.as_json() for one in report.simulators],
        "compiled": dataclasses.asdict(compiled) if compiled else None,
        "compiled_for_gpus": [{"candidate": one.as_json(), **found.as_json()} for one, found in accounts],
    }
