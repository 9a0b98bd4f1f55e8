"""Run an experiment: start jax, check, open, restore, train. Read next: `loop.py`.

The order matters: errors that can be found without allocating are raised first, by all processes together.
"""

import dataclasses
import json
import logging
import os
import platform
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from openpi_train.checkpoints.best import held_out_loss
from openpi_train.checkpoints.checkpoint_store import Checkpoints
from openpi_train.checkpoints.weights import CheckpointWeightLoader
from openpi_train.data.core.feed import differences, rows_of
from openpi_train.data.core.files import lines_of, write_json
from openpi_train.data.core.interface import Feed, OpenedData
from openpi_train.data.core.tuning import usable_cores
from openpi_train.data.robot.normalize import differing_norm_stats
from openpi_train.data.robot.opened import OpenedDatasets
from openpi_train.data.text.opened_texts import OpenedText
from openpi_train.evaluation.learning_verdict import LearningVerdict, learning_verdict
from openpi_train.evaluation.measure import EvaluationContext
from openpi_train.experiment import Experiment
from openpi_train.fields import as_json
from openpi_train.interop.checkpoint_tokenizer import check_tokenizer
from openpi_train.json_object import JsonObject
from openpi_train.launch import status
from openpi_train.models.language.accompanied import policy_of
from openpi_train.models.model_config import PolicyConfig
from openpi_train.parallel.state import TrainState
from openpi_train.rl.rollout_feed import RolloutFeed
from openpi_train.runtime import agree, logs, other_tools, phases, preempt, selftest, session
from openpi_train.runtime.device_limits import peak_flops
from openpi_train.runtime.exits import CheckpointError, HardwareError, Preempted, reported_as
from openpi_train.runtime.passing_errors import patiently
from openpi_train.runtime.phases import phase
from openpi_train.runtime.world import World, WorldFlags, find_world, is_restart
from openpi_train.training import crash_loop
from openpi_train.training.device_speed import DeviceSpeed
from openpi_train.training.documented_links import link_documented
from openpi_train.training.evaluate import Evaluator
from openpi_train.training.fitting import fitted
from openpi_train.training.goodput import Goodput, read_longest
from openpi_train.training.init import StateLayout, create_state, read_state
from openpi_train.training.loop import train
from openpi_train.training.metrics import MetricWriters, read_evaluations
from openpi_train.training.profiler import Profiler
from openpi_train.training.progress_report import ProgressReport
from openpi_train.training.recorder import Recorder
from openpi_train.training.resume_point import ResumePoint, resume_point, saved_position
from openpi_train.training.run import Run
from openpi_train.training.run_length import unfit_for_length
from openpi_train.training.rundir import check_commits, last_devices, open_run, record_start
from openpi_train.training.settling import Settling, require_early, settle
from openpi_train.training.step import Trainer
from openpi_train.training.stopping import interrupted

logger = logging.getLogger(__name__)


def main(experiment: Experiment, flags: WorldFlags, devices_per_process: int | None) -> int:
    """Run the experiment as one process, identified by flags and environment. Returns the exit code."""
    logs.configure(0)  # for what `find_world` has to say; which process this is, it says
    world = find_world(flags, os.environ)
    logs.configure(world.process_index)
    num_devices = None if devices_per_process is None else devices_per_process * world.process_count
    require_early(experiment, num_devices, asks_hub=world.process_index == 0)
    facts, timeouts = {"experiment": as_json(experiment)}, experiment.timeouts
    world = session.start(
        world,
        facts=facts,
        devices_per_process=devices_per_process,
        timeouts=timeouts,
        shared_folder=Path(experiment.checkpoint_base_dir),
    )
    run_met(experiment, world)
    with phase("ending"):
        session.stop(timeouts.finish_s)
    return 0


def run_met(experiment: Experiment, world: World) -> None:
    """Run the experiment in processes that have met, up to its report. Every process must call it.

    Before it raises Preempted, it leaves the session: all processes end together.
    """
    if experiment.resume and world.process_index == 0:
        directory = experiment.run_dir
        phases.expect(patiently(lambda: read_longest(directory), f"reading {directory}"))
    require_devices(experiment)
    with phase("preparing the run", abandonable=True):
        settling = settle(experiment, world)
        collectives = selftest.measure()
        if collectives is not None:
            logger.info("%s", collectives.line())
        run = start(settling, collectives)
    if world.process_index == 0 and (text := other_tools.warning(os.environ)):
        logger.warning("%s", text)
    try:
        with (
            crash_loop.counting(run.directory),
            jax.set_mesh(run.trainer.plan.real_mesh),
            phase("training", of_steps=True),
        ):
            if run.state.step < run.experiment.num_train_steps:
                train(run)
            else:
                logger.warning("nothing is left to train: raise --num-train-steps to go on")
                run.finish(keep_results=not run.catch_up(run.state))
    except Preempted:
        # All processes end together: the first to leave would abort the others.
        session.stop(experiment.timeouts.finish_s)
        raise
    except KeyboardInterrupt as error:
        raise interrupted(run.directory) from error
    with phase("ending"):
        report(run)


def require_devices(experiment: Experiment) -> None:
    """Raise HardwareError where a restart finds fewer devices than the start before it had. Every process calls it."""
    before = last_devices(experiment)
    if not is_restart(os.environ) or before is None or before["processes"] != jax.process_count():
        return
    here, had = jax.local_device_count(), before["devices"] // before["processes"]
    if here < had:
        raise HardwareError(f"this restart finds {here} of the {had} devices that each process of the run had")


def start(settling: Settling, collectives: selftest.Collectives | None) -> Run:
    """Open the run's directory, make its state, and put all parts together. Every process must call it."""
    data = settling.data
    assert data is not None, "a start opens them"
    directory = open_run(settling.recorded).path
    logs.configure(jax.process_index(), directory)
    logger.info("run directory: %s", directory)
    logger.info("log: %s", logs.log_path(directory, jax.process_index()))
    if jax.process_index() == 0:
        link_documented(settling.experiment, directory)
        for line in unfit_for_length(settling.experiment, data.num_samples):
            logger.warning("%s", line)
    prepared, programs = fitted(settling)
    experiment, trainer, layout = prepared.experiment, prepared.trainer, prepared.layout
    status.tell(opened=True)
    checkpoints = Checkpoints(
        directory,
        public_name=experiment.model.param_rules.public_name,
        keep_last=experiment.keep_last,
        keep_period=experiment.keep_period,
        local_directory=experiment.local_checkpoints.dir,
    )
    loop, older = crash_loop.begin(experiment, directory)
    feed = open_feed(experiment, trainer, data, directory)
    with jax.set_mesh(trainer.plan.real_mesh):
        state, meta = first_state(
            experiment,
            trainer,
            layout,
            checkpoints,
            feed,
            data.tokenizer,
            norm_stats=data.norm_stats_json(),
            older=older,
        )
        evaluator = make_evaluator(experiment, trainer, data, directory)
    check_commits()
    phases.at_step(int(state.step))
    if jax.process_index() == 0:
        measured = {"collectives": collectives.as_json() if collectives else None, "rows": data.row_shapes}
        patiently(lambda: record_start(settling.recorded, measured), f"writing to {directory}")
        patiently(lambda: write_json(directory / "plan.json", prepared.as_json()), f"writing to {directory}")
    recorder = make_recorder(experiment, feed, meta.get("unread_metrics"))
    # Process 0 alone reads the file, which grows all the time; which steps are evaluated all must see alike.
    own, path = None, directory / "metrics.jsonl"
    if jax.process_index() == 0:
        own = patiently(lambda: read_evaluations(path, int(state.step)), f"reading {path}")
    history = agree.broadcast("evaluations so far", own)
    if experiment.resume_from is not None:  # the best may have been a checkpoint that was set aside
        for line in history:
            if "val/loss" in line:
                checkpoints.note_metric(line["step"], held_out_loss(line))
    return Run(
        experiment=experiment,
        recorded=settling.recorded,
        directory=directory,
        trainer=trainer,
        layout=layout,
        state=state,
        data=data,
        feed=feed,
        recorder=recorder,
        evaluator=evaluator,
        checkpoints=checkpoints,
        crash_loop=loop,
        metrics=make_metrics(experiment, directory, feed, state, meta, data.num_samples),
        progress=ProgressReport(
            experiment.num_train_steps, start_step=int(state.step), process_index=jax.process_index()
        ),
        profiler=Profiler(
            directory / "profile",
            num_steps=experiment.profile if jax.process_index() == 0 else 0,
            first_step=int(state.step) + 1,
            wait=recorder.wait,
        ),
        history=history,
        programs=programs,
        goodput=make_goodput(directory, feed, int(state.step)) if jax.process_index() == 0 else None,
        device_speed=DeviceSpeed(jax.local_devices()) if jax.device_count() > 1 else None,
    )


def open_feed(experiment: Experiment, trainer: Trainer, data: OpenedData, directory: Path) -> Feed:
    """The run's batches: of its data, or of its own rollouts. Every process must call it."""
    cores = usable_cores() // agree.gather("hosts of the processes", platform.node()).count(platform.node())
    if experiment.rl is None:
        how: Any = {"sharding": trainer.plan.batch, "num_workers": experiment.num_workers, "cores": cores}
        return data.feed(batch_size=experiment.batch_size, **how)
    actor = experiment.rl.actor(running_of(experiment, trainer, data, directory), experiment.data)
    return RolloutFeed(experiment.rl, actor, trainer, batch_size=experiment.batch_size, directory=directory)


@phase("making the state")
def first_state(
    experiment: Experiment,
    trainer: Trainer,
    layout: StateLayout,
    checkpoints: Checkpoints,
    feed: Feed,
    tokenizer: str | None = None,
    *,
    norm_stats: Mapping[str, JsonObject] | None = None,
    older: int | None = None,
) -> tuple[TrainState, Mapping[str, Any]]:
    """With `--resume` the newest checkpoint, or that of `--resume-from`, and its `meta`; otherwise start weights or
    random ones and an empty `meta`. `older`: a checkpoint of the run to continue from instead of the newest.
    `norm_stats` are those of the run's data, by asset id, as their files hold them.
    """
    found = dataclasses.asdict(resume_point(experiment)) if jax.process_index() == 0 else None
    point = ResumePoint(**agree.broadcast("where the run continues", found))
    restored = None
    if older is not None:
        try:
            restored = checkpoints.restore(layout.abstract(), step=older, later="passed-over")
        except CheckpointError as error:
            logger.warning("%s", error)
    if experiment.resume and restored is None:
        restored = checkpoints.restore(layout.abstract(), step=point.step)
    if experiment.resume and restored is None and point.other is None:
        logger.info("--resume: there is no checkpoint yet; starting from step 0")
    if restored is not None:
        state, meta = restored
        check_tokenizer(meta.get("tokenizer"), tokenizer, where="the run")
        try:
            feed.seek(meta["data_position"])
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        if point.other is not None:
            logger.info("--resume-from: the run has checkpoints of its own by now, and continues from the newest")
        logger.info("continuing from step %d of %d", int(state.step), experiment.num_train_steps)
        return state, meta
    loader, where = experiment.weight_loader, "--weight-loader.params-path"
    if point.other is not None:
        loader, where = CheckpointWeightLoader(params_path=point.other, continue_training=True), "--resume-from"
    check_tokenizer(loader.tokenizer(), tokenizer, where=where)
    if (leaves := loader.load_state(experiment.model)) is not None:
        state = read_state(layout, leaves, where=where)
        if differs := differing_norm_stats(norm_stats or {}, loader.norm_stats(experiment.model)):
            logger.warning(
                "norm stats: this run's are not those of the training that it continues (%s), so the model sees inputs "
                "on another scale than before; give those of the checkpoint with --data.datasets.0.norm-stats FILE",
                differs,
            )
        feed.seek(_position(feed, int(state.step), point.other or getattr(experiment.weight_loader, "params_path", "")))
        logger.info("continuing the training that was saved at step %d", int(state.step))
        return state, {}
    with reported_as(CheckpointError):
        weights = loader.load(experiment.model)
    ema = experiment.ema_decay is not None
    state = create_state(
        layout, experiment.model, trainer.optimizer, experiment.is_frozen, ema, experiment.seed, weights
    )
    return state, {}


def _position(feed: Feed, step: int, checkpoint: str) -> dict[str, Any]:
    """Where the feed goes on after `step` of another run: behind the rows that it has seen, if its data are these."""
    here = {**feed.position(), "step": step}
    saved = saved_position(Path(checkpoint))
    return here if saved is None or differences(saved.get("data"), here["data"]) else dict(saved)


@phase("reading the held-out rows")
def make_evaluator(experiment: Experiment, trainer: Trainer, data: OpenedData, directory: Path) -> Evaluator:
    """The run's evaluator, with held-out rows that stay on the devices."""
    return Evaluator(running_of(experiment, trainer, data, directory, with_rows=True), experiment.eval)


def running_of(
    experiment: Experiment, trainer: Trainer, data: OpenedData, directory: Path, *, with_rows: bool = False
) -> EvaluationContext:
    """The run as measures and actors see it, with its held-out rows if asked; of own rollouts there are none."""
    with_rows &= experiment.rl is None
    rows = data.held_out(experiment.eval.num_rows, experiment.batch_size, trainer.plan.batch) if with_rows else []
    return EvaluationContext(
        trainer=trainer,
        data=data,
        held_out=rows,
        batch_size=experiment.batch_size,
        num_train_steps=experiment.num_train_steps,
        directory=directory,
        stop_requested=preempt.stop_requested,
    )


def make_recorder(experiment: Experiment, feed: Feed, unread: JsonObject | None) -> Recorder:
    """The run's recorder, with the devices' peak for `mfu`, and `unread` metrics."""
    peak = peak_flops(jax.devices()[0].device_kind, experiment.model.compute.dtype)
    return Recorder(
        batch_size=experiment.batch_size,
        peak_flops=peak * jax.device_count() if peak else None,
        counted_s={"data": lambda: feed.wait_s, **({"acting": lambda: feed.acting_s} if experiment.rl else {})},
        row_names=feed.rows,
        stop_on_nan=experiment.on_nan == "stop",
        unread=unread,
    )


def make_goodput(directory: Path, feed: Feed, step: int) -> Goodput:
    """The account of the run's time, continued. Raises CheckpointError if its file cannot be read."""
    with reported_as(CheckpointError):
        return Goodput(directory, step=step, waited_s=lambda: feed.wait_s)


def make_metrics(
    experiment: Experiment,
    directory: Path,
    feed: Feed,
    state: TrainState,
    meta: JsonObject,
    num_samples: int,
) -> MetricWriters:
    """The writers that the experiment requests; `num_samples` are those of an epoch."""
    size, step = experiment.batch_size, int(state.step)
    rows = rows_of({"step": step, "batch_size": size, **feed.position()})
    return MetricWriters(
        directory,
        process_index=jax.process_index(),
        resume_step=step,
        tensorboard=experiment.tensorboard,
        wandb_project=experiment.project_name if experiment.wandb_enabled else None,
        wandb_config=as_json(experiment),
        epoch_of=(lambda index: (rows + (index - step) * size) // num_samples) if experiment.logs_json else None,
        unwritten=meta.get("unwritten_metrics", ()),
    )


def _verdict(directory: Path) -> LearningVerdict:
    """Whether the run has learned, by all that it has written down."""
    return learning_verdict([json.loads(text) for _, text in lines_of(directory / "metrics.jsonl")])


def report(run: Run) -> None:
    """Log the run's directory and results, whether it has learned, and what to type next."""
    logger.info("the run lies in %s", run.directory)
    logger.info("log: %s", logs.log_path(run.directory, jax.process_index()))
    if len(run.history) > 1:
        for line in run.evaluator.changes(run.history[0], run.history[-1]):
            logger.info("%s", line)
    found = _verdict(run.directory) if jax.process_index() == 0 else LearningVerdict(has_learned=None)
    if found.reasons:
        logger.log(logging.WARNING if found.has_learned is False else logging.INFO, "%s", found.words)
    for line in _next_commands(run, found):
        logger.info("next: python -m openpi_train %s", line)


def _next_commands(run: Run, found: LearningVerdict) -> list[str]:
    """What to type after a run with this verdict."""
    experiment, place = run.experiment, shlex.quote(str(run.directory))
    lines, best, saved, why = [f"report {place}"], run.checkpoints.best, place, ""
    if found.lowest_step is not None and best is not None and best.step < run.step:
        saved, why = shlex.quote(str(run.directory / "best")), f"  # step {best.step}, of the lowest held-out loss"
    if isinstance(experiment.model, PolicyConfig):
        lines += [f"{one}{why}" for one in (*_evaluations(run, saved), f"serve {saved}")]
    elif policy_of(experiment.model) is not None:
        is_talk = isinstance(run.data, OpenedText) and run.data.is_conversational
        lines += [f"generate {saved} {'--message' if is_talk else '--prompt'} TEXT{why}", f"serve {saved}{why}"]
    longer = f"resume {place} --num-train-steps {2 * experiment.num_train_steps}"
    lines.append(longer)
    # A reward that did not rise says nothing of the learning rate.
    if found.has_learned is False and experiment.rl is None:
        peak = experiment.lr_schedule.peak_lr
        lines.append(f"{longer} --lr-schedule.peak-lr {3 * peak:g}  # 3 times the rate, if the loss hardly fell")
        lines.append(f"{longer} --lr-schedule.peak-lr {peak / 3:g}  # a third of the rate, if the loss rose")
    return lines


def _evaluations(run: Run, place: str) -> list[str]:
    """The words of `eval` for a robot policy's run: none without held-out episodes and without an environment."""
    if not isinstance(run.data, OpenedDatasets) or run.data.validation is not None:
        return [f"eval {place}"]
    return [f"eval {place} --held-out 0"] if run.experiment.robot_eval.closed_loop.num_episodes else []
