"""`Settling`: from an experiment and devices to all that is fixed of a run before its first step.

A start, a dry run, `doctor`, `plan` and `compile` read this one value, each as far as it needs. Its stages, each
computed once, when it is first asked for:

    fitted       the experiment on so many devices: rows, accumulation, groups, learning rate (`elastic.py`)
    layout       the shapes of the state; nothing is allocated
    on_kind      what `auto` means of attention and layers on this kind of device
    data         the opened data; None: rows are then as long as the model's config allows
    recorded     `given`, and `experiment`, what is left to choose, with their length in steps
    forecasts    memory and time of every strategy and rematerialisation policy that the flags leave open
    chosen       the best of them
    prepared     the experiment as it runs, with its step, its state's layout and its memory

Read next: `prepare.py`, which traces what is forecast; `start.py`, `dry_run.py` and `tools/plan.py`, which read it.
"""

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from openpi_train.data.core.feed import rows_of
from openpi_train.data.core.interface import OpenedData
from openpi_train.elastic import adapt
from openpi_train.experiment import Experiment
from openpi_train.json_object import JsonObject
from openpi_train.parallel.mesh import make_mesh, planned_mesh
from openpi_train.parallel.strategy import Plan
from openpi_train.planning.choose import on_kind
from openpi_train.planning.forecast import Forecast, Machine, instead, least_memory, recommend
from openpi_train.planning.memory import Memory, require
from openpi_train.planning.simulators import simulators_of
from openpi_train.runtime import agree
from openpi_train.runtime.device_kinds import GIB, kind_of
from openpi_train.runtime.device_limits import memory_bytes, total_bytes
from openpi_train.runtime.exits import DataError, ErrorCollector
from openpi_train.runtime.phases import phase
from openpi_train.runtime.world import World
from openpi_train.training.init import StateLayout
from openpi_train.training.prepare import BatchSpec, forecasts, layout_costs, make_trainer, whole_layout
from openpi_train.training.resume_point import begun
from openpi_train.training.rundir import check_folder, check_run, devices_at_first, tell_beginning, use_first_commits
from openpi_train.training.start_check import (
    check_devices,
    check_downloads,
    check_files,
    check_host_room,
    check_trainable,
    examine_data,
    tell_rate,
    tell_simulators,
    tell_state,
    tell_uncut,
    with_checked_attention,
)
from openpi_train.training.step import Trainer

logger = logging.getLogger(__name__)


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
            "attention": self.experiment.model.compute.attention,
            "available_bytes_per_device": self.available_bytes,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settling:
    """An experiment as `given`, on a `machine`; the module says what follows from them."""

    given: Experiment
    # Its memory is that of idle devices, so that a choice is the same at every start.
    machine: Machine
    # The bytes that are free on each of this run's own devices; None: it has others, and nothing is checked on them.
    free_bytes: int | None = None
    processes_on_host: int = 1
    # The devices at the first start of the run that `given` continues; None: it begins.
    began_on: int | None = None
    # Opens the run's data, or does not: None. It gets the experiment as fitted.
    opening: Callable[[Experiment], OpenedData | None] = lambda experiment: None
    # Rows unlike those of the experiment's data.
    batch_spec: BatchSpec | None = None
    # Whether more micro-batches than the experiment's are also forecast.
    opens_accumulation: bool = False
    # What the mesh is made of; None: all devices of jax.
    devices: Sequence[Any] | None = None

    @classmethod
    def here(
        cls, given: Experiment, world: World, opening: Callable[[Experiment], OpenedData | None] = lambda given: None
    ) -> "Settling":
        """On this run's own devices. Every process must call it, and read the same stages."""
        use_first_commits(given)
        device, processes = jax.local_devices()[0], world.local_count or 1
        sizes = [measure(device, processes) for measure in (memory_bytes, total_bytes)]
        free, total = map(min, zip(*agree.gather("memory of a device", sizes), strict=True))
        return cls(
            given=given,
            machine=this_machine(total),
            free_bytes=free,
            processes_on_host=processes,
            began_on=devices_at_first(given),
            opening=opening,
        )

    @classmethod
    def ahead(cls, given: Experiment, num_devices: int) -> "Settling":
        """On so many devices of which nothing is known. It has no stage that plans on them."""
        use_first_commits(given)
        machine = Machine(kind=kind_of(""), num_devices=num_devices, num_hosts=1, available_bytes=0)
        return cls(given=given, machine=machine, began_on=devices_at_first(given))

    @functools.cached_property
    def _adapted(self) -> tuple[Experiment, list[str]]:
        return adapt(self.given, self.machine.num_devices, self.began_on)

    @property
    def fitted(self) -> Experiment:
        """The experiment on so many devices."""
        return self._adapted[0]

    @property
    def lines(self) -> list[str]:
        """What was decided for that, for the log."""
        return self._adapted[1]

    @functools.cached_property
    def layout(self) -> StateLayout:
        """The state's shapes, sharded nowhere.

        Raises UsageError for fields that are in conflict, or ask what these devices cannot do.
        """
        experiment = self.fitted
        experiment.check(self.machine.num_devices)
        if self.free_bytes is not None:
            check_devices(experiment)
        layout = whole_layout(experiment, Plan(mesh=planned_mesh(1, 1), strategy="replicated"))
        check_trainable(experiment, layout)
        if self.free_bytes is not None:
            tell_state(experiment, layout)
            if experiment.num_epochs is None:
                tell_rate(experiment)
        return layout

    @functools.cached_property
    def on_kind(self) -> Experiment:
        """The experiment with what `--model.attention auto` and `--unroll-layers auto` mean on these devices."""
        experiment = self.fitted if self.free_bytes is None else with_checked_attention(self.fitted)
        return on_kind(experiment, self.machine)

    @functools.cached_property
    def data(self) -> OpenedData | None:
        """The run's opened data. Raises DataError."""
        return self.opening(self.fitted)

    @functools.cached_property
    def recorded(self) -> Experiment:
        """The experiment as given, with its length in steps: a run directory keeps it, and a resume compares it."""
        given, data = self.given, self.data
        if given.num_epochs is None or data is None:
            return given
        found = begun(given) if jax.process_index() == 0 else None
        steps = _in_steps(given.num_epochs, self.on_kind, data, agree.broadcast("where the run goes on", found))
        return dataclasses.replace(given, num_train_steps=steps)

    @functools.cached_property
    def experiment(self) -> Experiment:
        """The run but for strategy and rematerialisation, with its length in steps. Raises UsageError."""
        if self.given.num_epochs is None:
            return self.on_kind
        experiment = self.on_kind
        if self.data is not None:
            steps = self.recorded.num_train_steps
            experiment = dataclasses.replace(experiment, num_train_steps=steps, num_epochs=None)
            experiment.check(self.machine.num_devices)
        if self.free_bytes is not None:
            tell_rate(experiment)
        return experiment

    @property
    def rows(self) -> BatchSpec | None:
        """The largest batch of so many rows; None: rows are as long as the model's config allows."""
        if (data := self.data) is None:
            return self.batch_spec
        return lambda num_rows: batch_specs(self.experiment, data, num_rows)[-1]

    @functools.cached_property
    def forecasts(self) -> list[Forecast]:
        """Every strategy with every rematerialisation policy that the flags allow, on this machine.

        But of a run whose step is small against the devices with the policy that recomputes least that policy alone:
        it does not choose, so that its first step is not held up.
        """
        layout = self.layout  # what the flags ask in vain is told before the devices are used
        return forecasts(
            *(self.experiment, layout, self.machine, self._accumulations(), self.rows),
            of_all_policies=self.opens_accumulation,
        )

    def _accumulations(self) -> list[int]:
        """Micro-batches per step to choose from: the given number, or more of them unless the flags settle it."""
        experiment = self.experiment
        if not self.opens_accumulation or experiment.micro_batch_size is not None:
            return [experiment.grad_accum]
        rows = experiment.batch_size * experiment.sharding.tensor_devices // self.machine.num_devices
        return [n for n in range(experiment.grad_accum, rows + 1) if rows % n == 0]

    @functools.cached_property
    def chosen(self) -> Forecast:
        """Strategy and rematerialisation policy as given by flags, or the best ones; of what does not fit, the least.

        The log has the choice, the reason and the alternatives.
        """
        chosen, why = recommend(self.forecasts)
        logger.info("%s", why)
        if len(self.forecasts) > 1:
            usable = self.machine.usable_bytes / GIB
            others = (
                f"{one.words()}{'' if one.fits else ' does not fit'}" for one in self.forecasts if one is not chosen
            )
            logger.info("%.1f GiB of each device can be used; else there was: %s", usable, "; ".join(others))
        return chosen or least_memory(self.forecasts)

    @functools.cached_property
    def prepared(self) -> Prepared:
        """The run as it is chosen. Raises DoesNotFit if a host has too little memory for the offloaded state."""
        return self._prepared_as(self.chosen)

    def instead(self, failed: Prepared, needed_bytes: int) -> Prepared | None:
        """The run with another choice, where `failed` needs so many bytes on a device by the compiler. None if no other
        needs less."""
        other = instead(self.forecasts, failed.forecast, needed_bytes)
        return None if other is None else self._prepared_as(other)

    def _prepared_as(self, chosen: Forecast) -> Prepared:
        experiment = self.experiment.remat_choices()[chosen.policy.remat]
        tell_uncut(chosen)
        sharding, layout = experiment.sharding, self.layout.of(experiment.model)
        mesh = make_mesh(chosen.layout.fsdp_devices, self.devices, sharding.tensor_devices)
        trainer = make_trainer(experiment, layout, sharding.plan(mesh, chosen.layout.strategy))
        if self.free_bytes is not None and sharding.offload != "none":
            check_host_room(sharding.offload, chosen.memory, self.processes_on_host)
        if self.free_bytes is not None:
            tell_simulators(simulators_of(experiment, self.processes_on_host * jax.local_device_count()))
        return Prepared(
            experiment=experiment,
            trainer=trainer,
            layout=layout.under(trainer.plan),
            forecast=chosen,
            available_bytes=self.available_bytes,
        )

    @property
    def available_bytes(self) -> int:
        """Bytes on each device that the run can have."""
        return self.machine.available_bytes if self.free_bytes is None else self.free_bytes

    def require_state(self) -> None:
        """Raise DoesNotFit if the state alone does not fit the devices, sharded as far as the flags allow."""
        experiment = self.on_kind
        costs = layout_costs(experiment, self.layout, self.machine)
        least = min((cost.memory(experiment.grad_accum) for cost in costs), key=lambda memory: memory.total)
        require(least, self.available_bytes, self.machine.num_devices, experiment, self._fits_on)

    def require_room(self) -> None:
        """Raise DoesNotFit if the run does not fit the devices."""
        experiment = self.prepared.experiment
        require(self.prepared.memory, self.available_bytes, self.machine.num_devices, experiment, self._fits_on)

    def _fits_on(self, num_devices: int) -> bool:
        """Whether the run may fit so many of these devices, which share its state, with the fewest rows at a time."""
        groups = num_devices // self.on_kind.sharding.tensor_devices
        rows, rest = divmod(self.on_kind.batch_size, groups)
        if rest or not rows:
            return False
        *_, recomputing_most = self.on_kind.remat_choices().values()
        experiment = dataclasses.replace(
            recomputing_most,
            sharding=dataclasses.replace(self.on_kind.sharding, strategy="auto"),
            fsdp_devices=groups,
            grad_accum=rows,
            micro_batch_size=None,
        )
        machine = dataclasses.replace(self.machine, num_devices=num_devices, num_hosts=1)
        found = forecasts(experiment, self.layout, machine, [rows], self.batch_spec, of_all_policies=True)
        return any(one.memory.least <= self.available_bytes for one in found)

    def require_start(self, on_devices: Callable[[], None]) -> None:
        """Raise what is wrong with a start on these devices, all of it together, after `require_early`.

        `on_devices` raises what is wrong with its plan; a run that is refused otherwise is not planned.
        """
        together = ErrorCollector()
        with together:
            self.fitted.check(self.machine.num_devices)
        with together:
            check_run(self.given)  # what differs from a run that goes on is told before it is planned
        if not together.errors:
            with together:
                on_devices()
        together.raise_all()


def require_early(
    given: Experiment, num_devices: int | None = None, *, has_files: bool = True, asks_hub: bool = False
) -> list[str]:
    """Raise what is known to be wrong with a start before jax has devices, all of it together.

    Each process calls it before it meets the others, and launchers before a job waits. Returns what was not looked at.

    Args:
        num_devices: those of the run; None: not known yet.
        has_files: whether the run's files are on this machine.
        asks_hub: whether the hub is asked, once for each, for what is not in its client's cache.
    """
    smallest = max(given.sharding.tensor_devices * (given.fsdp_devices or 1), 1)
    settling, notes = Settling.ahead(given, num_devices or smallest), []
    together = ErrorCollector()
    with together:
        settling.fitted.check(num_devices)
    if has_files:
        with together:
            check_folder(given)
        check_files(given, settling.fitted, together)
        notes = examine_data(settling.fitted, together)
        if asks_hub:
            check_downloads(given, settling.fitted, together)
        if together.errors:  # a wrong name may be why flags are missing; else `check_run` tells it
            tell_beginning(given)
    together.raise_all()
    return notes


def settle(given: Experiment, world: World) -> Settling:
    """All stages, for a run that starts. Every process must call it; nothing of the run is written.

    Errors that do not depend on the data are raised before these are opened, which may take long. Raises UsageError or
    DataError.
    """
    settling = Settling.here(given, world, open_in_turn)
    for line in settling.lines:
        logger.info("%s", line)

    def on_devices() -> None:
        _ = settling.layout, settling.on_kind
        settling.require_state()

    settling.require_start(on_devices)
    settling.require_room()
    return settling


def this_machine(total_bytes: int) -> Machine:
    """The devices of jax, each with `total_bytes`."""
    return Machine(
        kind=kind_of(jax.devices()[0].device_kind),
        num_devices=jax.device_count(),
        num_hosts=jax.device_count() // jax.local_device_count(),
        available_bytes=total_bytes,
    )


def open_in_turn(experiment: Experiment) -> OpenedData:
    """Open the experiment's data, first on process 0, which makes indexes and norm stats for the others.

    Raises DataError with what to do, also if processes find rows of different shapes (another tokenizer, or other
    instructions).
    """
    limit_s = experiment.timeouts.data_s
    with phase("opening the data", least_s=limit_s), agree.process_0_first("has opened the data", limit_s):
        together, data = ErrorCollector(), None
        with together:
            data = experiment.open_data()
        if data is None:
            examine_data(experiment, together)  # to tell what is wrong with the other datasets, too
        together.raise_all()
        assert data is not None, "its error was raised"
    shapes = agree.gather("the shapes of a row", data.row_shapes)
    for index, other in enumerate(shapes):
        if other != shapes[0]:
            raise DataError(f"rows are {other} on process {index}, {shapes[0]} on process 0: their data differ")
    return data


def open_if_ready(experiment: Experiment) -> OpenedData | None:
    """Open the experiment's data if that reads nothing at length and writes nothing; else None.

    Every process must call it. Raises DataError as `open_in_turn`.
    """
    is_ready = all(agree.gather("whether the data are ready", experiment.data_are_ready()))
    return open_in_turn(experiment) if is_ready else None


def batch_specs(experiment: Experiment, data: OpenedData, batch_size: int) -> list[Any]:
    """Every shape in which these data give batches to the experiment's model, the largest last."""
    if experiment.rl is not None:
        return [experiment.batch_spec(batch_size, data)]
    return data.batch_specs(batch_size) or [experiment.data.batch_spec(experiment.model, batch_size)]


def _in_steps(
    num_epochs: int, experiment: Experiment, data: OpenedData, begun: tuple[int, JsonObject] | None = None
) -> int:
    """The optimizer steps of `num_epochs` passes over the samples, or of RL over its contexts.

    `begun` is where the run goes on (`resume_point.begun`): the steps before may have had another batch size.
    """
    rl, size = experiment.rl, experiment.batch_size
    what, number, at_a_time, each = "samples", data.num_samples, size, 1
    if rl is not None:
        what, number = "contexts", rl.num_prompts(experiment.data, data)
        at_a_time, each = rl.num_groups, rl.steps_per_iteration(size)
    before, seen = _seen(begun, at_a_time) if begun is not None else (0, 0)
    steps = before + each * max(math.ceil((num_epochs * number - seen) / at_a_time), 0)
    logger.info("%d epochs of %d %s, %d at a time: %d steps", num_epochs, number, what, at_a_time, steps)
    return max(steps, each)


def _seen(begun: tuple[int, JsonObject], at_a_time: int) -> tuple[int, int]:
    """The steps before, and the samples or contexts that they took."""
    step, position = begun
    if "iteration" in position:
        return step, position["iteration"] * at_a_time
    return step, rows_of({"step": step, "batch_size": at_a_time, **position})
