"""A dry run: what a run needs, and whether it would start. Read next: `settle.py`, which does it in earnest."""

import dataclasses
import json
import math
import os

import jax

from openpi_train.elastic import adapt
from openpi_train.experiment import Experiment
from openpi_train.launch.ahead_of_start import SIZES_LINE, RunSizes
from openpi_train.planning.memory import require
from openpi_train.runtime.device_kinds import GIB
from openpi_train.runtime.exits import Together
from openpi_train.runtime.world import WorldFlags, find_world
from openpi_train.training.prepare import Prepared, prepare_without_data
from openpi_train.training.run_length import unfit_for_length
from openpi_train.training.rundir import begins, check_run, devices_at_first
from openpi_train.training.start_check import check_files, examine_data


def check_ahead(given: Experiment, num_devices: int) -> int:
    """Raise what a start on so many devices would, as far as it is soon known without them. Prints what is not."""
    experiment, _ = adapt(given, num_devices, devices_at_first(given))
    # Groups and replicas as given: on fewer devices than at first `adapt` has made them smaller.
    tensor_devices = given.sharding.tensor_devices
    replica_devices = tensor_devices * (given.fsdp_devices or 1)
    sizes = RunSizes(rows=experiment.batch_size, tensor_devices=tensor_devices, replica_devices=replica_devices)
    print(f"{SIZES_LINE}{json.dumps(dataclasses.asdict(sizes))}")
    together = Together()
    with together:
        experiment.check(num_devices)
    with together:
        check_run(given)
    check_files(given, experiment, together)
    notes = examine_data(experiment, together)
    together.raise_all()
    if not begins(given):
        print(f"it goes on with the run in {given.run_dir}; for a new run give another --exp-name")
    for note in notes:
        print(f"not checked: {note}")
    return 0


def dry_run(experiment: Experiment, flags: WorldFlags, devices_per_process: int | None) -> int:
    """Print what the run needs on this process's devices and what there is; allocates and writes nothing.

    Raises all that a start would: run directory, start weights, packages and datasets are looked at, too. What takes
    long to find out is named instead.
    """
    world = find_world(flags, os.environ)
    if devices_per_process is not None:
        jax.config.update("jax_num_cpu_devices", devices_per_process)
    given = experiment
    experiment, lines = adapt(given, jax.device_count(), devices_at_first(given))
    print("\n".join(lines))
    together = Together()
    with together:
        experiment.check(jax.device_count())
    with together:
        check_run(given)
    if not together.errors:
        with together:
            _tell_sizes(experiment, prepare_without_data(experiment, world))
    check_files(given, experiment, together)
    notes = examine_data(experiment, together)
    together.raise_all()
    if experiment.num_epochs is None:  # else the length in steps is known when the data are open
        for line in unfit_for_length(experiment):
            print(f"warning: {line}")
    print("fits")
    for note in notes:
        print(f"not checked: {note}")
    return 0


def _tell_sizes(experiment: Experiment, prepared: Prepared) -> None:
    """Print the parameters, and the memory by its uses. Raises DoesNotFit."""
    memory = prepared.memory
    counts = {
        "parameters": sum(math.prod(leaf.shape) for leaf in prepared.layout.shapes.params.values()),
        "frozen parameters": sum(math.prod(leaf.shape) for leaf in prepared.layout.shapes.frozen.values()),
    }
    for name, count in counts.items():
        print(f"{name:<24} {count:>15,}")
    for name, size in {**memory.as_json(), "available": prepared.available_bytes}.items():
        print(f"{name:<24} {size / GIB:>11.2f} GiB per device")
    require(memory, prepared.available_bytes, jax.device_count(), experiment)
