"""The strategies that a run's flags allow, and the cost of each per device.

A common rule of thumb uses the parameter count instead (`docs/understand/sharding.md`). Read next: `forecast.py`, which
compares the times of those that fit.
"""

import dataclasses
import functools

import jax.numpy as jnp

from openpi_train.experiment import Experiment
from openpi_train.nn.attention import best_kind
from openpi_train.parallel.mesh import FSDP, TENSOR, planned_mesh
from openpi_train.parallel.params import Gathering, merge_module, param_kinds
from openpi_train.parallel.strategy import Plan, Strategy
from openpi_train.planning.forecast import LayoutCost, Machine
from openpi_train.planning.generation import generation_bytes
from openpi_train.planning.links import Flow, flows
from openpi_train.planning.memory import Memory, PlannedState, predict
from openpi_train.planning.rollout_cost import RolloutCost
from openpi_train.planning.traffic import bytes_beside, formula_by_axes, tensor_bytes


def layouts(experiment: Experiment, num_devices: int, devices_per_host: int) -> list[tuple[Strategy, int]]:
    """The strategies to choose from, each with the number of devices that share one copy of the state.

    More than one only if neither `--sharding.strategy` nor `--fsdp-devices` was given.
    """
    given, strategy = experiment.fsdp_devices, experiment.sharding.strategy
    # A tensor group counts as one device: the strategies shard over such groups.
    num_devices //= experiment.sharding.tensor_devices
    devices_per_host //= experiment.sharding.tensor_devices
    if strategy != "auto":
        default = {"replicated": 1, "hsdp": max(devices_per_host, 1)}.get(strategy, num_devices)
        return [(strategy, given or default)]
    if given is not None:
        return [("zero3", given) if given > 1 else ("replicated", 1)]
    if num_devices == 1:
        return [("replicated", 1)]
    within_host: list[tuple[Strategy, int]] = [("hsdp", devices_per_host)] if 1 < devices_per_host < num_devices else []
    # Models' dims are small multiples of powers of two: few are divisible by 12, all by 4.
    sizes = [num_devices, *({num_devices & -num_devices} - {1, num_devices})]
    cut: list[tuple[Strategy, int]] = [(strategy, size) for strategy in ("zero1", "zero2") for size in sizes]
    deep: list[tuple[Strategy, int]] = [("zero3", size) for size in sizes if ("hsdp", size) not in within_host]
    return [("replicated", 1), *cut, *within_host, *deep]


def on_kind(experiment: Experiment, machine: Machine) -> Experiment:
    """The experiment with what `--unroll-layers auto` and `--model.attention auto` mean on these devices.

    All in the table of kinds are GPUs. In tensor groups XLA keeps what unrolled layers should compute again with `full`
    (jaxlib 0.10.2).
    """
    unrolled, model = experiment.unroll_layers, experiment.model
    if unrolled == "auto":
        unrolled = machine.kind.is_known and experiment.sharding.tensor_devices == 1
    if heads := model.compute.open_heads:
        model = model.with_compute(attention=best_kind(heads, model.compute.dtype, machine.kind))
    return dataclasses.replace(experiment, unroll_layers=unrolled, model=model)


def planned(experiment: Experiment, strategy: Strategy, fsdp_devices: int, num_devices: int) -> Plan:
    """The plan for devices that need not be present."""
    sharding = experiment.sharding
    mesh = planned_mesh(fsdp_devices, num_devices, sharding.tensor_devices)
    return sharding.plan(mesh, strategy)


def layout_cost(
    experiment: Experiment,
    state: PlannedState,
    strategy: Strategy,
    fsdp_devices: int,
    machine: Machine,
    rl: RolloutCost | None = None,
) -> LayoutCost:
    """Bytes on a device and on the links under a strategy, of a `state` (`training/init.py: StateLayout`).

    `experiment` is one for the machine's kind (`on_kind`); `rl` is what own rollouts cost, of a run that makes
    some.
    """
    plan = planned(experiment, strategy, fsdp_devices, machine.num_devices)
    dtype, cut = jnp.dtype(experiment.model.compute.dtype), state.under(plan)
    tensor_devices = experiment.sharding.tensor_devices
    generation = max((generation_bytes(size, tensor_devices) for size in experiment.generation_sizes()), default=0)

    kinds = param_kinds(merge_module(cut.graphdef, {**cut.shapes.frozen, **cut.shapes.params}))
    at_once = frozenset(path for path, kind in kinds.items() if kind.gathering is Gathering.AT_ONCE)
    # Of tables only rows are sent, and few.
    fixed = {path: leaf for path, leaf in state.shapes.frozen.items() if kinds[path].gathering is not Gathering.BY_ROW}

    @functools.cache
    def memory(num_micros: int) -> Memory:
        step = predict(cut, plan, num_micros=num_micros, dtype=dtype, unrolled=experiment.unroll_layers is True)
        more = {} if rl is None else rl.on_device(experiment.batch_size, machine.num_devices // tensor_devices)
        if more.get("acting"):
            more["acting"] += step.compute_copy
        return dataclasses.replace(step, generation=generation, **more)

    def sent(num_micros: int, summed_bytes_per_row: float) -> list[Flow]:
        rows = experiment.batch_size * tensor_devices / machine.num_devices
        by_axes = {
            **formula_by_axes(plan, state.shapes.params, dtype.itemsize, num_micros, at_once, fixed),
            (TENSOR,): tensor_bytes(plan, summed_bytes_per_row, rows),
        }
        return flows(by_axes, plan.mesh, machine.devices_per_host)

    def beside_bytes(num_micros: int) -> float:
        sizes = plan, state.shapes.params, dtype.itemsize, num_micros, at_once, fixed
        return bytes_beside(*sizes, unrolled=experiment.unroll_layers is True)

    def beside(num_micros: int) -> list[Flow]:
        return flows({(FSDP,): beside_bytes(num_micros)}, plan.mesh, machine.devices_per_host)

    return LayoutCost(
        strategy=strategy,
        fsdp_devices=fsdp_devices,
        tensor_devices=tensor_devices,
        memory=memory,
        flows=sent,
        beside=beside,
        beside_bytes=beside_bytes,
        rl=rl,
        uncut_share=plan.uncut_share({**state.shapes.frozen, **state.shapes.params}),
    )
