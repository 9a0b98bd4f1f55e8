"""From an experiment to a finished run: start jax, check, open, restore, train. Read next: `loop.py`.

The order matters: what can be refused without allocating anything is refused first, and by all processes together.
"""

import dataclasses
import logging
import math
import os
from pathlib import Path
from typing import Any

import jax

from openpi_train.data.feed import Feed
from openpi_train.data.files import write_json
from openpi_train.data.normalize import norm_stats_json
from openpi_train.data.opened import OpenedData, open_data
from openpi_train.data.tokenizer import load_tokenizer
from openpi_train.experiment import Experiment, as_json
from openpi_train.planning.devices import memory_bytes, peak_flops
from openpi_train.planning.memory import Memory, predict, require
from openpi_train.runtime import agree, logs, session
from openpi_train.runtime.exits import CheckpointError, DataError, Preempted, UsageError, reported_as
from openpi_train.runtime.world import World, WorldFlags, find_world
from openpi_train.sharding.mesh import make_mesh
from openpi_train.sharding.strategy import Plan
from openpi_train.training.checkpoint import Checkpoints
from openpi_train.training.evaluate import Evaluator, held_out_batches
from openpi_train.training.init import StateLayout, create_state, lay_out
from openpi_train.training.loop import train
from openpi_train.training.metrics import Metrics, read_evaluations, require_writers
from openpi_train.training.progress import ProgressReport
from openpi_train.training.recorder import Recorder
from openpi_train.training.run import Run
from openpi_train.training.rundir import RunRequest, check_run, open_run, record_start
from openpi_train.training.state import TrainState
from openpi_train.training.step import Trainer

logger = logging.getLogger(__name__)

# Indexing a dataset of terabytes on a slow disk may take hours; the wait says whom it is for.
DATA_TIMEOUT_S = 6 * 3600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """What is known of a run before anything is allocated."""

    trainer: Trainer
    layout: StateLayout
    memory: Memory
    available_bytes: int


def main(experiment: Experiment, flags: WorldFlags, devices_per_process: int | None) -> int:
    """Run the experiment as the process that flags and environment say this is. Returns the exit code."""
    logs.configure(0)  # for what `find_world` has to say; which process this is, it says
    world = find_world(flags, os.environ)
    logs.configure(world.process_index)
    world = session.start(world, facts={"experiment": as_json(experiment)}, devices_per_process=devices_per_process)
    prepared = prepare(experiment, world)
    require(prepared.memory, prepared.available_bytes, jax.device_count(), experiment)
    run = start(experiment, prepared)
    try:
        with jax.set_mesh(prepared.trainer.plan.mesh):
            if run.state.step < experiment.num_train_steps:
                train(run)
            else:
                logger.warning("nothing is left to train: raise --num-train-steps to go on")
                run.close()
        report(run)
    except Preempted:
        session.stop()  # all processes end together: whoever left first would abort the others
        raise
    session.stop()
    return 0


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
    prepared = prepare(experiment, world)
    memory = prepared.memory
    lines = {
        "parameters": sum(math.prod(leaf.shape) for leaf in prepared.layout.shapes.params.values()),
        "frozen parameters": sum(math.prod(leaf.shape) for leaf in prepared.layout.shapes.frozen.values()),
    }
    for name, count in lines.items():
        print(f"{name:<24} {count:>15,}")
    for name, size in {**memory.as_json(), "available": prepared.available_bytes}.items():
        print(f"{name:<24} {size / 2**30:>11.2f} GiB per device")
    require(memory, prepared.available_bytes, jax.device_count(), experiment)
    print("fits")
    return 0


def start(experiment: Experiment, prepared: Prepared) -> Run:
    """Open directory, data and state. Every process must call it."""
    trainer, layout = prepared.trainer, prepared.layout
    request = RunRequest(
        checkpoint_base_dir=experiment.checkpoint_base_dir,
        experiment_name=experiment.name,
        exp_name=experiment.exp_name,
        experiment=as_json(experiment),
        resume=experiment.resume,
        overwrite=experiment.overwrite,
    )
    require_writers(tensorboard=experiment.tensorboard, wandb=experiment.wandb_enabled)
    check_run(request)
    data = open_data_in_turn(experiment)
    directory = open_run(request).path
    logs.configure(jax.process_index(), directory)
    logger.info("run directory: %s", directory)
    checkpoints = Checkpoints(
        directory,
        public_name=experiment.model.public_name,
        keep_last=experiment.keep_last,
        keep_period=experiment.keep_period,
    )
    feed = Feed(
        data.train,
        batch_size=experiment.batch_size,
        sharding=trainer.plan.batch,
        num_workers=experiment.num_workers,
    )
    with jax.set_mesh(trainer.plan.mesh):
        state = first_state(experiment, trainer, layout, checkpoints, feed)
        evaluator = make_evaluator(experiment, trainer, data)
    if jax.process_index() == 0:
        record_start(request)
        write_json(directory / "plan.json", prepared.memory.as_json())
    return Run(
        experiment=experiment,
        directory=directory,
        trainer=trainer,
        layout=layout,
        state=state,
        feed=feed,
        recorder=make_recorder(experiment, feed),
        evaluator=evaluator,
        checkpoints=checkpoints,
        metrics=make_metrics(experiment, directory, int(state.step)),
        progress=ProgressReport(
            experiment.num_train_steps, start_step=int(state.step), process_index=jax.process_index()
        ),
        history=read_evaluations(directory / "metrics.jsonl", int(state.step)),
        norm_stats={asset: norm_stats_json(stats) for asset, stats in data.norm_stats.items()},
    )


def open_data_in_turn(experiment: Experiment) -> OpenedData:
    """`open_run_data`, process 0 first: it builds the index and the norm stats, the others find them."""
    if jax.process_index() == 0:
        data = open_run_data(experiment)
        agree.barrier("process 0 has opened the data", DATA_TIMEOUT_S)
        return data
    agree.barrier("process 0 has opened the data", DATA_TIMEOUT_S)
    return open_run_data(experiment)


def open_run_data(experiment: Experiment) -> OpenedData:
    """The experiment's rows, norm stats and tokenizer. Raises DataError with what to do."""
    model, config = experiment.model, experiment.data
    with reported_as(DataError):
        tokenizer = load_tokenizer(config.tokenizer, offline=config.offline, max_vocab_size=model.vocab_size)
        return open_data(
            config,
            horizon=model.action_horizon,
            seed=experiment.seed,
            transforms=model.transforms(tokenizer),
            batch_spec=model.batch_spec,
            normalization=model.normalization,
            assets_dir=experiment.assets_dir,
        )


def first_state(
    experiment: Experiment, trainer: Trainer, layout: StateLayout, checkpoints: Checkpoints, feed: Feed
) -> TrainState:
    """The newest checkpoint with `--resume`, else start weights or fresh ones."""
    restored = checkpoints.restore(layout.abstract()) if experiment.resume else None
    if experiment.resume and restored is None:
        logger.info("--resume: there is no checkpoint yet; starting from step 0")
    if restored is not None:
        state, meta = restored
        try:
            feed.seek(meta["data_position"])
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        logger.info("continuing from step %d of %d", int(state.step), experiment.num_train_steps)
        return state
    with reported_as(CheckpointError):
        weights = experiment.weight_loader.load(experiment.model)
    ema = experiment.ema_decay is not None
    return create_state(
        layout, experiment.model, trainer.optimizer, experiment.is_frozen, ema, experiment.seed, weights
    )


def make_evaluator(experiment: Experiment, trainer: Trainer, data: OpenedData) -> Evaluator:
    """The held-out rows, on the devices for the whole run."""
    batches: list[Any] = []
    if data.validation is not None:
        feed = Feed(data.validation, batch_size=experiment.batch_size, sharding=trainer.plan.batch)
        num_rows = min(experiment.eval.num_rows, data.validation.num_samples)
        batches = held_out_batches(feed, experiment.batch_size, num_rows)
        feed.close()
    else:
        logger.warning("no episode is held out: there will be no held-out loss (--data.validation-fraction)")
    return Evaluator(trainer, batches, experiment.eval.num_sample_steps)


def make_recorder(experiment: Experiment, feed: Feed) -> Recorder:
    """Knows what a step costs, for `mfu`: the model's forward FLOPs, and twice that backward."""
    forward = experiment.model.flops_per_row(len(experiment.data.cameras), experiment.objective.draws_per_row)
    peak = peak_flops(jax.devices()[0].device_kind)
    return Recorder(
        batch_size=experiment.batch_size,
        flops_per_step=3 * forward * experiment.batch_size,
        peak_flops=peak * jax.device_count() if peak else None,
        wait_s=lambda: feed.wait_s,
        row_names=feed.rows,
        stop_on_nan=experiment.on_nan == "stop",
    )


def make_metrics(experiment: Experiment, directory: Path, resume_step: int) -> Metrics:
    """The writers that the experiment asks for."""
    return Metrics(
        directory,
        process_index=jax.process_index(),
        resume_step=resume_step,
        tensorboard=experiment.tensorboard,
        wandb_project=experiment.project_name if experiment.wandb_enabled else None,
        wandb_config=as_json(experiment),
    )


def report(run: Run) -> None:
    """Say where the run lies and what became of it."""
    logger.info("the run lies in %s", run.directory)
    if len(run.history) < 2:
        return
    first, last = run.history[0], run.history[-1]
    suffix, weights = ("_ema", ", averaged weights") if "val/loss_ema" in last else ("", "")
    before, after = first[f"val/loss{suffix}"], last[f"val/loss{suffix}"]
    logger.info("held-out loss%s: %.4f before, %.4f after", weights, before, after)
    if f"val/action_mse{suffix}" in last:
        logger.info(
            "open-loop action error (mean squared, normalised): %.4f before, %.4f after; mean-action baseline %.4f",
            first[f"val/action_mse{suffix}"],
            last[f"val/action_mse{suffix}"],
            last["val/action_mse_mean_baseline"],
        )
