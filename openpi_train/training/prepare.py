"""Prepares a run before anything is allocated: mesh, layout, memory, and whether it fits these devices.

Read next: `settle.py`, which calls it before and after it opens the data.
"""

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Container
from typing import Any

import jax
import optax

from openpi_train.experiment import Experiment
from openpi_train.nn.attention import best_kind
from openpi_train.nn.attention_check import flash_problem
from openpi_train.optim import LossScaling
from openpi_train.parallel.mesh import make_mesh
from openpi_train.parallel.params import gatherings, merge_module
from openpi_train.parallel.state import TrainState
from openpi_train.parallel.strategy import HOST_MEMORY, Plan, Strategy
from openpi_train.planning.choose import layout_cost, layouts, planned, settled
from openpi_train.planning.costs import (
    ROWS,
    ActivationBytes,
    TracedGradient,
    cost,
    gpu_activation_bytes,
    live_activation_bytes,
)
from openpi_train.planning.forecast import Forecast, LayoutCost, Machine, RematCost, forecast, least_memory, recommend
from openpi_train.planning.memory import Memory, require, require_host
from openpi_train.planning.practice_cost import PracticeCost
from openpi_train.runtime import agree
from openpi_train.runtime.device_kinds import GIB, HOST_LINK_GB_S, kind_of
from openpi_train.runtime.device_limits import host_bytes_per_device, memory_bytes, total_bytes
from openpi_train.runtime.exits import UsageError
from openpi_train.runtime.phases import phase
from openpi_train.runtime.world import World
from openpi_train.training.init import StateLayout, lay_out
from openpi_train.training.step import Trainer
from openpi_train.training.traced_practice import practice_cost

logger = logging.getLogger(__name__)

# From a number of rows to the batch's shapes, as a tree of `jax.ShapeDtypeStruct`.
BatchSpec = Callable[[int], Any]
# A share of the parameters that causes a warning if it should be sharded but cannot be.
_NOTABLE = 0.02


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run before anything is allocated. All choices in `experiment` are made."""

    experiment: Experiment
    trainer: Trainer
    layout: StateLayout
    forecast: Forecast
    available_bytes: int

    @property
    def memory(self) -> Memory:
        """Bytes on each device."""
        return self.forecast.memory

    def as_json(self) -> dict[str, Any]:
        """The forecast, for `plan.json`."""
        return {
            **self.forecast.as_json(),
            "attention": self.experiment.model.attention_kind,
            "available_bytes_per_device": self.available_bytes,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Examined:
    """A run before its data are open: the state per device, and the devices.

    `available_bytes` are free on each, of `total_bytes` that jax may use.
    """

    layout: StateLayout
    available_bytes: int
    total_bytes: int
    processes_on_host: int


def examine(experiment: Experiment, world: World) -> Examined:
    """The state's shapes and the devices. Every process must call it; allocates nothing.

    Raises UsageError for what the flags ask and these devices cannot do.
    """
    experiment.check(jax.device_count())
    sharding = experiment.sharding
    if sharding.offload != "none":
        check_host_memory(sharding.offload)
    if jax.local_device_count() % sharding.tensor_devices:
        logger.warning(
            "--sharding.tensor-devices %d: such groups span several processes of %d devices; where those are on "
            "different hosts, every layer waits for the links between them",
            *(sharding.tensor_devices, jax.local_device_count()),
        )
    device, processes = jax.local_devices()[0], world.local_count or 1
    sizes = agree.gather("memory of a device", [measure(device, processes) for measure in (memory_bytes, total_bytes)])
    available, total = map(min, zip(*sizes, strict=True))
    layout = whole_layout(experiment, Plan(mesh=make_mesh(1), strategy="replicated"))
    check_trainable(experiment, layout)
    logger.info("learning rate: %s", experiment.lr_schedule.in_words(experiment.num_train_steps))
    return Examined(layout=layout, available_bytes=available, total_bytes=total, processes_on_host=processes)


def require_state(experiment: Experiment, examined: Examined) -> None:
    """Raise DoesNotFit if the state alone does not fit the devices, sharded as far as the flags allow."""
    costs = layout_costs(experiment, examined.layout, this_machine(examined.total_bytes))
    least = min((cost.memory(experiment.grad_accum) for cost in costs), key=lambda memory: memory.total)
    require(least, examined.available_bytes, jax.device_count(), experiment)


def prepare(experiment: Experiment, examined: Examined, batch_spec: BatchSpec | None = None) -> Prepared:
    """Strategy, rematerialisation, layout and memory of the run. Every process must call it; allocates nothing.

    `batch_spec` is that of the run's data; None: rows are as long as the model's config allows.

    Raises DoesNotFit if a host has too little memory for the offloaded state.
    """
    sharding, layout = experiment.sharding, examined.layout
    chosen = choose(experiment, layout, this_machine(examined.total_bytes), batch_spec)
    if (whole := chosen.layout.uncut_share) >= _NOTABLE:
        devices = chosen.layout.fsdp_devices
        power_of_two = devices & -devices  # models' dims are powers of two, or few times one
        logger.warning(
            "%s over %d devices leaves %.0f %% of the parameters whole on each: none of their dims divides by %d%s",
            *(chosen.layout.strategy, devices, 100 * whole, devices),
            f". Try --fsdp-devices {power_of_two}" if power_of_two < devices else "",
        )
    experiment = as_chosen(experiment, chosen)
    layout = layout.of(experiment.model)
    trainer = make_trainer(
        experiment, layout, make_plan(experiment, chosen.layout.strategy, chosen.layout.fsdp_devices)
    )
    if sharding.offload != "none":
        check_host_room(sharding.offload, chosen.memory, examined.processes_on_host)
    return Prepared(
        experiment=experiment,
        trainer=trainer,
        layout=layout.under(trainer.plan),
        forecast=chosen,
        available_bytes=examined.available_bytes,
    )


def with_checked_attention(experiment: Experiment) -> Experiment:
    """The experiment, with attention by XLA if cuDNN's, which `auto` means here, is wrong on any process's device.

    Every process must call it, before anything that traces the model.
    """
    model = experiment.model
    dtype, kind = model.compute_dtype, kind_of(jax.devices()[0].device_kind)
    if best_kind(model.attention_heads, dtype, kind) == "xla":
        return experiment
    heads = [one.of_device(experiment.sharding.tensor_devices) for one in model.attention_heads]
    with phase("checking cuDNN's attention", abandonable=True):
        problems = agree.gather("cuDNN's attention", flash_problem(heads, dtype))
    for process, problem in enumerate(problems):
        if problem is not None:
            logger.warning("attention by XLA, as cuDNN's is not right on process %d: %s", process, problem)
            return dataclasses.replace(experiment, model=model.with_attention("xla"))
    logger.info("attention by cuDNN: its outputs and gradients are right on these devices")
    return experiment


def prepare_without_data(experiment: Experiment, world: World) -> Prepared:
    """The run as it would be with rows as long as the model's config allows. Raises as `examine` and `prepare`."""
    examined = examine(experiment, world)
    return prepare(with_checked_attention(experiment), examined)


def whole_layout(experiment: Experiment, whole: Plan) -> StateLayout:
    """The run's state under `whole`, a plan that shards nothing."""
    optimizer, has_ema = experiment.optimizer.create(_schedule(experiment)), experiment.ema_decay is not None
    return lay_out(experiment.model, optimizer, experiment.is_frozen, has_ema, whole, _loss_scaling(experiment))


def make_trainer(experiment: Experiment, layout: StateLayout, plan: Plan) -> Trainer:
    """The run's step under `plan`. `--unroll-layers auto` is settled before (`as_chosen`), and else a loop."""
    schedule = _schedule(experiment)
    return Trainer(
        graphdef=layout.graphdef,
        model=experiment.model,
        objective=experiment.objective,
        optimizer=experiment.optimizer.create(schedule),
        schedule=schedule,
        plan=plan,
        seed=experiment.seed,
        grad_accum=experiment.grad_accum,
        unroll_layers=experiment.unroll_layers is True,
        ema_decay=experiment.ema_decay,
        ema_warmup=experiment.ema_warmup,
        loss_scaling=_loss_scaling(experiment),
    )


def _schedule(experiment: Experiment) -> optax.Schedule:
    return experiment.lr_schedule.over(experiment.num_train_steps).create()


def _loss_scaling(experiment: Experiment) -> LossScaling | None:
    return experiment.loss_scaling if experiment.model.needs_loss_scale else None


def this_machine(total_bytes: int) -> Machine:
    """The local devices, each with `total_bytes`."""
    return Machine(
        kind=kind_of(jax.devices()[0].device_kind),
        num_devices=jax.device_count(),
        num_hosts=jax.device_count() // jax.local_device_count(),
        available_bytes=total_bytes,
    )


def choose(
    experiment: Experiment, layout: StateLayout, machine: Machine, batch_spec: BatchSpec | None = None
) -> Forecast:
    """Strategy and rematerialisation policy as given by flags, or the best ones for these devices.

    The log has the choice, the reason and the alternatives. If nothing fits, returns what needs least memory.
    """
    found = forecasts(experiment, layout, machine, [experiment.grad_accum], batch_spec)
    chosen, why = recommend(found)
    logger.info("%s", why)
    if len(found) > 1:
        usable = machine.usable_bytes / GIB
        others = [f"{one.words()}{'' if one.fits else ' does not fit'}" for one in found if one is not chosen]
        logger.info("%.1f GiB of each device can be used; else there was: %s", usable, "; ".join(others))
    return chosen or least_memory(found)


def forecasts(
    experiment: Experiment,
    layout: StateLayout,
    machine: Machine,
    accumulations: list[int],
    batch_spec: BatchSpec | None = None,
) -> list[Forecast]:
    """Forecasts for every strategy and rematerialisation policy that the flags allow."""
    experiment = settled(experiment, machine)
    practice = traced_practice(experiment, layout, batch_spec)
    costs = layout_costs(experiment, layout, machine, practice)
    of_gpus = functools.partial(gpu_activation_bytes, sends=machine.num_devices > 1)
    activation_bytes = of_gpus if machine.kind.is_known else live_activation_bytes
    trace = functools.partial(policy_costs, experiment, layout, batch_spec, activation_bytes)
    gather = any(cost.fsdp_devices > 1 for cost in costs)
    policies = {gather: trace(gathers=gather)}
    if gather and not all(cost.fsdp_devices > 1 for cost in costs):
        others = [one for one in policies[True] if one.remat != "none"]
        policies[False] = [*trace(gathers=False, names=("none",)), *others]
    return [
        forecast(machine, cost, policy, experiment.batch_size, accumulations)
        for cost in costs
        for policy in policies[cost.fsdp_devices > 1]
    ]


def layout_costs(
    experiment: Experiment, layout: StateLayout, machine: Machine, practice: PracticeCost | None = None
) -> list[LayoutCost]:
    """The cost of the state per device, and of own attempts, under every strategy that the flags allow."""
    open_strategies = layouts(experiment, machine.num_devices, machine.devices_per_host)
    return [layout_cost(experiment, layout, *one, machine, practice) for one in open_strategies]


def traced_practice(
    experiment: Experiment, state: StateLayout, batch_spec: BatchSpec | None = None
) -> PracticeCost | None:
    """What own attempts cost; None if the run makes none."""
    if experiment.practice is None:
        return None
    # Nothing is kept for a backward pass.
    one = dataclasses.replace(next(iter(experiment.remat_choices().values())), grad_accum=1)
    whole = planned(one, "replicated", 1, one.sharding.tensor_devices)
    trainer = make_trainer(one, state.of(one.model), whole)
    batch = batch_spec(ROWS) if batch_spec else one.batch_spec(ROWS)
    return practice_cost(one, trainer, {**state.shapes.frozen, **state.shapes.params}, batch)


def policy_costs(
    experiment: Experiment,
    state: StateLayout,
    batch_spec: BatchSpec | None = None,
    activation_bytes: ActivationBytes = live_activation_bytes,
    *,
    gathers: bool = False,
    names: Container[str | None] | None = None,
) -> list[RematCost]:
    """The cost of a row under each allowed rematerialisation policy, or of those of these `names`, least recomputation
    first.

    `gathers`: on devices that gather layers, which store less with `none` if they are unrolled.
    """
    return [
        cost(name, traced_gradient(one, state, batch_spec, gathers=gathers), activation_bytes)
        for name, one in experiment.remat_choices().items()
        if names is None or name in names
    ]


def traced_gradient(
    experiment: Experiment, state: StateLayout, batch_spec: BatchSpec | None = None, *, gathers: bool = False
) -> TracedGradient:
    """Loss and gradient of one micro-batch, for `state` or for that of another policy, as one device computes them.

    Or one tensor group. `gathers`: layers store what gathered ones store.
    """
    whole = planned(experiment, "replicated", 1, experiment.sharding.tensor_devices)
    one = dataclasses.replace(experiment, grad_accum=1)
    batch = batch_spec(ROWS) if batch_spec else experiment.batch_spec(ROWS)
    trainer = dataclasses.replace(make_trainer(one, state.of(experiment.model), whole), as_gathered=gathers)

    def gradient(state: TrainState, batch: Any) -> Any:
        return trainer.accumulate(state, batch, trainer.objective.norms(batch))

    traced = jax.make_jaxpr(gradient)(state.shapes, batch)
    numbered = jax.tree.unflatten(jax.tree.structure(state.shapes), range(len(jax.tree.leaves(state.shapes))))
    shapes = {**state.shapes.frozen, **state.shapes.params}
    apart = gatherings(merge_module(state.graphdef, shapes))
    return TracedGradient(
        experiment=one,
        jaxpr=traced.jaxpr,
        trained=sorted(state.shapes.params),
        fixed={number: path for path, number in numbered.frozen.items()},
        at_once={n: path for path, n in numbered.params.items() if path not in apart and shapes[path].ndim > 1},
    )


def as_chosen(experiment: Experiment, chosen: Forecast) -> Experiment:
    """The experiment with the rematerialisation policy of `chosen`, and layers unrolled or not as on its devices."""
    experiment = settled(experiment, chosen.machine)
    return experiment.remat_choices()[chosen.policy.remat]


def make_plan(experiment: Experiment, strategy: Strategy, fsdp_devices: int) -> Plan:
    """The plan for these devices under a strategy that shards over `fsdp_devices` of them."""
    sharding = experiment.sharding
    mesh = make_mesh(fsdp_devices, tensor_devices=sharding.tensor_devices)
    return sharding.plan(mesh, strategy)


def check_host_memory(offload: str) -> None:
    """Raise UsageError if these devices cannot access their host's memory."""
    device = jax.local_devices()[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST_MEMORY not in kinds:
        raise UsageError(
            f"--sharding.offload {offload} needs devices that read their host's memory ({HOST_MEMORY}); "
            f"{device.device_kind} has: {', '.join(kinds)}. Use --sharding.offload none; zero3 over more devices, "
            "--optimizer.moment-dtype bfloat16 and --optimizer adafactor need less memory, too"
        )


def check_host_room(offload: str, memory: Memory, processes_on_host: int) -> None:
    """Log what is kept in host memory. Raises DoesNotFit if a host has too little. All processes call it."""
    require_host(memory, min(agree.gather("memory of a host", host_bytes_per_device(processes_on_host))), offload)
    logger.info(
        "offload %s: %.1f GiB of each device's state lie in host memory; to read and write them takes about %.2g s of "
        "a step at %d GB/s each way (PCIe 4.0 x16)",
        offload,
        memory.host / GIB,
        memory.host_link_s,
        HOST_LINK_GB_S,
    )


def check_trainable(experiment: Experiment, layout: StateLayout) -> None:
    """Log how many parameters train. Raises UsageError if none does, or if `--freeze` matches nothing."""
    trainable, frozen = layout.shapes.params, layout.shapes.frozen
    if not trainable:
        raise UsageError(f"--freeze {experiment.freeze!r} leaves no parameter to train; all {len(frozen)} match it")
    if experiment.freeze is not None and not any(experiment.freezes(path) for path in frozen):
        names = ", ".join(experiment.model.public_name(path) for path in list(trainable)[:3])
        raise UsageError(f"--freeze {experiment.freeze!r} matches no parameter as a whole; there are {names}, ...")
    sizes = [sum(math.prod(leaf.shape) for leaf in leaves.values()) for leaves in (trainable, frozen)]
    logger.info("parameters: %s train, %s are kept fixed", *(f"{size:,}" for size in sizes))
