"""What is known of a run before anything is allocated: mesh, layout, memory, and how it fits these devices.

Read next: `start.py`, which goes on from here.
"""

import dataclasses
import logging
import math
import os

import jax

from openpi_train.elastic import adapt
from openpi_train.experiment import Experiment
from openpi_train.planning.devices import memory_bytes
from openpi_train.planning.memory import Memory, predict, require
from openpi_train.runtime.exits import UsageError
from openpi_train.runtime.world import World, WorldFlags, find_world
from openpi_train.sharding.mesh import make_mesh
from openpi_train.sharding.strategy import Plan
from openpi_train.training.init import StateLayout, lay_out
from openpi_train.training.rundir import RunRequest, devices_at_first
from openpi_train.training.step import Trainer

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """What is known of a run before anything is allocated."""

    trainer: Trainer
    layout: StateLayout
    memory: Memory
    available_bytes: int


def fit(experiment: Experiment, request: RunRequest) -> Experiment:
    """The experiment as it runs on these devices, and a log line for all that this changes. All processes call it."""
    experiment, lines = adapt(experiment, jax.device_count(), devices_at_first(request))
    for line in lines:
        logger.info("%s", line)
    return experiment


def prepare(experiment: Experiment, world: World) -> Prepared:
    """Mesh, layout and memory of the run. Raises UsageError for what the flags ask and these devices cannot do."""
    experiment.check(jax.device_count())
    plan = Plan(mesh=make_mesh(experiment.fsdp_devices), config=experiment.sharding)
    schedule = experiment.lr_schedule.create()
    optimizer = experiment.optimizer.create(schedule)
    model = experiment.model
    layout = lay_out(model, optimizer, experiment.is_frozen, experiment.ema_decay is not None, plan)
    check_trainable(experiment, layout)
    trainer = Trainer(
        graphdef=layout.graphdef,
        model=model,
        objective=experiment.objective,
        optimizer=optimizer,
        schedule=schedule,
        plan=plan,
        seed=experiment.seed,
        grad_accum=experiment.grad_accum,
        ema_decay=experiment.ema_decay,
    )
    rows = experiment.batch_size // (jax.device_count() * experiment.grad_accum)
    activations = model.activation_bytes_per_row(len(experiment.data.cameras), experiment.objective.draws_per_row)
    return Prepared(
        trainer=trainer,
        layout=layout,
        memory=predict(layout, plan, activations, rows),
        available_bytes=memory_bytes(jax.local_devices()[0], world.local_count or 1),
    )


def check_trainable(experiment: Experiment, layout: StateLayout) -> None:
    """Say how much trains. Raises UsageError where nothing does, or where `--freeze` matches nothing."""
    trainable, frozen = layout.shapes.params, layout.shapes.frozen
    if not trainable:
        raise UsageError(f"--freeze {experiment.freeze!r} leaves no parameter to train; all {len(frozen)} match it")
    if experiment.freeze is not None and not any(experiment.freezes(path) for path in frozen):
        names = ", ".join(experiment.model.public_name(path) for path in list(trainable)[:3])
        raise UsageError(f"--freeze {experiment.freeze!r} matches no parameter as a whole; there are {names}, ...")
    sizes = [sum(math.prod(leaf.shape) for leaf in leaves.values()) for leaves in (trainable, frozen)]
    logger.info("parameters: %s train, %s are kept fixed", *(f"{size:,}" for size in sizes))


def dry_run(experiment: Experiment, flags: WorldFlags, devices_per_process: int | None) -> int:
    """Print what the run needs on this process's devices and what there is; allocates nothing."""
    world = find_world(flags, os.environ)
    if devices_per_process is not None:
        jax.config.update("jax_num_cpu_devices", devices_per_process)
    experiment, lines = adapt(experiment, jax.device_count(), None)
    print("\n".join(lines))
    prepared = prepare(experiment, world)
    memory = prepared.memory
    counts = {
        "parameters": sum(math.prod(leaf.shape) for leaf in prepared.layout.shapes.params.values()),
        "frozen parameters": sum(math.prod(leaf.shape) for leaf in prepared.layout.shapes.frozen.values()),
    }
    for name, count in counts.items():
        print(f"{name:<24} {count:>15,}")
    for name, size in {**memory.as_json(), "available": prepared.available_bytes}.items():
        print(f"{name:<24} {size / 2**30:>11.2f} GiB per device")
    require(memory, prepared.available_bytes, jax.device_count(), experiment)
    print("fits")
    return 0
