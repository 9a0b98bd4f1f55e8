"""Settle an experiment: make all choices that depend on devices and data. Read next: `prepare.py`, `start.py`.

The given flags, the devices and the data are combined here, once; all later code reads the result.
"""

import dataclasses
import logging
import math
from collections.abc import Mapping
from typing import Any

import jax

from openpi_train.data.feed import rows_of
from openpi_train.data.interface import OpenedData
from openpi_train.elastic import adapt
from openpi_train.experiment import Experiment
from openpi_train.planning.memory import require
from openpi_train.runtime import agree
from openpi_train.runtime.exits import DataError, Together
from openpi_train.runtime.phases import phase
from openpi_train.runtime.world import World
from openpi_train.training.prepare import Examined, Prepared, examine, prepare, require_state, with_checked_attention
from openpi_train.training.resume_point import begun
from openpi_train.training.rundir import check_run, devices_at_first, use_first_commits
from openpi_train.training.start_check import check_files, examine_data

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settled:
    """A run before anything is allocated or written.

    `given` is the experiment as given, with its length in steps: the run directory stores it and a resume
    compares it. `prepared` describes the run on these devices.
    """

    given: Experiment
    data: OpenedData
    prepared: Prepared

    @property
    def experiment(self) -> Experiment:
        """The experiment as it runs."""
        return self.prepared.experiment


def settle(given: Experiment, world: World) -> Settled:
    """Fit the experiment to its devices and data. Every process must call it; nothing of the run is written.

    Errors that do not depend on the data are raised before these are opened, which may take long. Raises UsageError or
    DataError.
    """
    use_first_commits(given)
    experiment, lines = adapt(given, jax.device_count(), devices_at_first(given))
    for line in lines:
        logger.info("%s", line)
    experiment, examined = _examined(given, experiment, world)
    data = open_in_turn(experiment)
    if given.num_epochs is not None:
        found = begun(given) if jax.process_index() == 0 else None
        steps = _in_steps(given.num_epochs, experiment, data, agree.broadcast("where the run goes on", found))
        given = dataclasses.replace(given, num_train_steps=steps)
        experiment = dataclasses.replace(experiment, num_train_steps=steps, num_epochs=None)
        experiment.check(jax.device_count())
    prepared = prepare(experiment, examined, lambda num_rows: batch_specs(experiment, data, num_rows)[-1])
    require(prepared.memory, prepared.available_bytes, jax.device_count(), experiment)
    return Settled(given=given, data=data, prepared=prepared)


def _examined(given: Experiment, experiment: Experiment, world: World) -> tuple[Experiment, Examined]:
    """The experiment with an attention that is right here, and its state on these devices.

    Raises what is known to be wrong before the data are open, all of it together. The data are only looked at then.
    """
    together, examined = Together(), None
    with together:
        experiment.check(jax.device_count())
    with together:
        check_run(given)  # what differs from a run that goes on is told before it is planned
    if not together.errors:
        with together:
            examined = examine(experiment, world)
            experiment = with_checked_attention(experiment)
            require_state(experiment, examined)
    check_files(given, experiment, together)
    if together.errors:
        examine_data(experiment, together)
    together.raise_all()
    assert examined is not None, "its error was raised"
    return experiment, examined


def batch_specs(experiment: Experiment, data: OpenedData, batch_size: int) -> list[Any]:
    """Every shape in which these data give batches to the experiment's model, the largest last."""
    if experiment.practice is not None:
        return [experiment.batch_spec(batch_size, data)]
    return data.batch_specs(batch_size) or [experiment.data.batch_spec(experiment.model, batch_size)]


def open_in_turn(experiment: Experiment) -> OpenedData:
    """Open the experiment's data, first on process 0, which makes indexes and norm stats for the others.

    Raises DataError with what to do, also if processes find rows of different shapes (another tokenizer, or other
    instructions).
    """
    limit_s = experiment.timeouts.data_s
    with phase("opening the data", least_s=limit_s), agree.process_0_first("has opened the data", limit_s):
        together, data = Together(), None
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


def _in_steps(
    num_epochs: int, experiment: Experiment, data: OpenedData, begun: tuple[int, Mapping[str, Any]] | None = None
) -> int:
    """The optimizer steps of `num_epochs` passes over the samples, or of practice over its contexts.

    `begun` is where the run goes on (`resume_point.begun`): the steps before may have had another batch size.
    """
    practice, size = experiment.practice, experiment.batch_size
    what, number, at_a_time, each = "samples", data.num_samples, size, 1
    if practice is not None:
        what, number = "contexts", practice.num_contexts(experiment.data, data)
        at_a_time, each = practice.num_groups, practice.steps_per_iteration(size)
    before, seen = _seen(begun, at_a_time) if begun is not None else (0, 0)
    steps = before + each * max(math.ceil((num_epochs * number - seen) / at_a_time), 0)
    logger.info("%d epochs of %d %s, %d at a time: %d steps", num_epochs, number, what, at_a_time, steps)
    return max(steps, each)


def _seen(begun: tuple[int, Mapping[str, Any]], at_a_time: int) -> tuple[int, int]:
    """The steps before, and the samples or contexts that they took."""
    step, position = begun
    if "iteration" in position:
        return step, position["iteration"] * at_a_time
    return step, rows_of({"step": step, "batch_size": at_a_time, **position})
