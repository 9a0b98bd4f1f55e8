"""A dry run: what a run needs, and whether it would start. Read next: `settling.py`, which a start reads, too."""

import dataclasses
import json
import math
import os
from collections.abc import Sequence

import jax

from openpi_train.experiment import Experiment
from openpi_train.launch import preflight
from openpi_train.runtime import other_tools
from openpi_train.runtime.device_kinds import GIB
from openpi_train.runtime.world import WorldFlags, find_world
from openpi_train.training.resume_point import begun
from openpi_train.training.run_length import length_in_words, num_recorded, unfit_for_length
from openpi_train.training.rundir import begins
from openpi_train.training.settling import Settling, open_if_ready, require_early
from openpi_train.training.start_check import remote_weights


def check_ahead(given: Experiment, num_devices: int) -> int:
    """Raise what a start on so many devices would, as far as it is soon known without them. Prints what is not.

    `num_devices` 0: their number is not known.
    """
    settling = Settling.ahead(given, max(num_devices, 1))
    # Groups and replicas as given: on fewer devices than at first they are fitted to be smaller.
    tensor_devices = given.sharding.tensor_devices
    replica_devices = tensor_devices * (given.fsdp_devices or 1)
    sizes = preflight.RunSizes(
        rows=settling.fitted.batch_size, tensor_devices=tensor_devices, replica_devices=replica_devices
    )
    print(f"{preflight.SIZES_LINE}{json.dumps(dataclasses.asdict(sizes))}")
    notes = require_early(given, num_devices or None, has_files=preflight.has_files())
    if not begins(given):
        print(f"it goes on with the run in {given.run_dir}; for a new run give another --exp-name")
    _tell_unchecked(notes)
    return 0


def dry_run(given: Experiment, flags: WorldFlags, devices_per_process: int | None) -> int:
    """Print what the run needs on this process's devices and what there is; allocates and writes nothing.

    Raises all that a start would: run directory, start weights, packages and datasets are looked at, too. What takes
    long to find out is named instead.
    """
    world = find_world(flags, os.environ)
    if devices_per_process is not None:
        jax.config.update("jax_num_cpu_devices", devices_per_process)
    notes = require_early(given)
    settling = Settling.here(given, world, open_if_ready)
    print("\n".join(settling.lines))
    if (point := begun(given)) is not None:
        print(f"it goes on from step {point[0]}")
    settling.require_start(lambda: _tell_sizes(settling))
    if settling.experiment.num_epochs is None:  # else the length in steps is known when the data are open
        for line in unfit_for_length(settling.experiment):
            print(f"warning: {line}")
    prepared = settling.prepared
    if prepared.memory.total <= prepared.available_bytes:
        print("fits")
    else:
        print("may not fit: the estimate, which may be a quarter too high, is above what there is; a start compiles")
        print("its step, and knows. A larger --grad-accum needs less: fewer rows at a time")
    if text := other_tools.warning(os.environ):
        print(f"warning: {text}")
    step_s = prepared.forecast.step_s if prepared.forecast.machine.kind.is_known and given.rl is None else None
    num_samples = num_recorded(given) if settling.data is None else settling.data.num_samples
    if length := length_in_words(settling.experiment, step_s, num_samples):
        print(f"length: {length}")
    for line in remote_weights(given):
        print(f"start weights: {line}")
    if settling.data is None:
        _tell_unchecked(notes)
    return 0


def _tell_sizes(settling: Settling) -> None:
    """Print the parameters, and the memory by its uses. Raises DoesNotFit."""
    prepared = settling.prepared
    counts = {
        "parameters": sum(math.prod(leaf.shape) for leaf in prepared.layout.shapes.params.values()),
        "frozen parameters": sum(math.prod(leaf.shape) for leaf in prepared.layout.shapes.frozen.values()),
    }
    for name, count in counts.items():
        print(f"{name:<24} {count:>15,}")
    for name, size in {**prepared.memory.as_json(), "available": prepared.available_bytes}.items():
        if round(size / GIB, 2) or name in ("total", "available"):
            print(f"{name:<24} {size / GIB:>11.2f} GiB per device")
    print(f"{'rows':<24} {'as long as is allowed' if settling.data is None else 'those of the data'}")
    settling.require_room()


def _tell_unchecked(notes: Sequence[str]) -> None:
    for note in notes:
        print(f"not checked: {note}")
