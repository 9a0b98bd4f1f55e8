"""`Run`: the parts of a started run, as used by the loop. Read next: `start.py`, which makes one."""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from openpi_train.checkpoints import fencing
from openpi_train.checkpoints.best import held_out_loss, lowest_loss
from openpi_train.checkpoints.checkpoint_store import Checkpoints
from openpi_train.data.core.files import write_json
from openpi_train.data.core.interface import Feed, OpenedData
from openpi_train.experiment import Experiment
from openpi_train.fields import as_json
from openpi_train.launch import status
from openpi_train.parallel.state import TrainState
from openpi_train.planning.compiled import check_plan
from openpi_train.planning.gpu.run_account import RECORD, run_account
from openpi_train.planning.memory import bytes_per_device
from openpi_train.runtime import agree, garbage, phases, preempt, session
from openpi_train.runtime.exits import CheckpointError, RunError, StorageError
from openpi_train.runtime.passing_errors import patiently
from openpi_train.runtime.phases import phase
from openpi_train.training import crash_loop
from openpi_train.training.crash_loop import CrashLoop
from openpi_train.training.device_memory import fullest_device
from openpi_train.training.device_speed import DeviceSpeed
from openpi_train.training.evaluate import Evaluator
from openpi_train.training.goodput import Goodput
from openpi_train.training.init import StateLayout
from openpi_train.training.iterations import write_iterations
from openpi_train.training.metrics import MetricWriters
from openpi_train.training.profiler import Profiler
from openpi_train.training.program import Programs
from openpi_train.training.progress_report import ProgressReport
from openpi_train.training.recorder import Recorder
from openpi_train.training.results import write_results
from openpi_train.training.settling import batch_specs, this_machine
from openpi_train.training.slow_hosts import SlowDevices, SlowHosts
from openpi_train.training.step import StepFunction, Trainer
from openpi_train.training.traced_steps import read_trace

logger = logging.getLogger(__name__)

# In a row: somebody may make room on the disk meanwhile.
_MOST_FAILED_SAVES = 3


@dataclasses.dataclass(kw_only=True)
class Run:
    """One process's view of a run, made before the loop starts. It records `history`, the evaluations, and the last
    step and its metrics.
    """

    experiment: Experiment
    recorded: Experiment
    """As `experiment.json` has it: what the start chose is open there."""
    directory: Path
    trainer: Trainer
    layout: StateLayout
    state: TrainState
    data: OpenedData
    feed: Feed
    recorder: Recorder
    evaluator: Evaluator
    checkpoints: Checkpoints
    metrics: MetricWriters
    progress: ProgressReport
    profiler: Profiler
    history: list[dict[str, Any]]
    goodput: Goodput | None = None
    device_speed: DeviceSpeed | None = None
    slow_hosts: SlowHosts = dataclasses.field(default_factory=SlowHosts)
    slow_devices: SlowDevices = dataclasses.field(default_factory=SlowDevices)
    crash_loop: CrashLoop = dataclasses.field(default_factory=CrashLoop)
    programs: Programs | None = None
    started: float = dataclasses.field(default_factory=time.perf_counter)
    step: int = 0
    saved_step: int = 0
    failed_saves: int = 0
    last_metrics: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    warned: set[str] = dataclasses.field(default_factory=set)

    def __post_init__(self):
        self.step = int(self.state.step)
        self.feed.reads_ahead = not self._is_careful()

    @phase("compiling the training step", abandonable=True)
    def compile_step(self, state: TrainState) -> StepFunction:
        """The compiled step, with a log line for how long that took."""
        if self.programs is None:
            logger.info("compiling the training step (a first time can take minutes)")
        self.feed.start()  # data workers start meanwhile
        batches = batch_specs(self.experiment, self.data, self.experiment.batch_size)
        self.programs = self.programs or Programs(self.trainer, self.layout.shardings, state)
        self.programs.compile(batches)
        self.programs.lateness = self.recorder.lateness
        if jax.process_index() == 0:
            fencing.require_owned(self.directory)
            batch_bytes = bytes_per_device(batches[-1], self.trainer.plan.batch)
            path, longest = self.directory / "program.json", dataclasses.asdict(self.programs.longest)
            patiently(lambda: write_json(path, longest), f"writing {path}")
            check_plan(self.directory / "plan.json", self.programs.compiled, batch_bytes)
            found = run_account(self.programs.compiled, this_machine(0), self.programs.longest.compile_s)
            if found is not None:
                write_json(self.directory / RECORD, found.as_json())
        # gloo gives up on processes that compile for 30 s longer than others.
        agree.gather("the compiled training step", None)
        garbage.look_as_usual()
        self.recorder.begin()
        self._account(int(state.step))
        return self.programs

    @contextlib.contextmanager
    def taking(self, step: int) -> Iterator[None]:
        """Wraps the loop's work for one step, without evaluating and saving."""
        if self._is_careful() and jax.process_index() == 0:
            crash_loop.record_step(self.directory, self.crash_loop, step, lambda: self.feed.rows(step - 1))
        with self.profiler.step(step):
            yield
        self._tell_traced(step)

    def _tell_traced(self, step: int) -> None:
        """Write what the traced steps spent in communication, once their trace is written."""
        written = self.profiler.take_trace()
        if written is None or self.programs is None:
            return
        with phase("reading the profile"):
            found = read_trace(written[0], self.programs.instruction_roles(), written[1])
        if found is not None:
            logger.info("%s", found.line())
            self.metrics.log(step, found.metrics())

    def note(self, step: int, metrics: Mapping[str, object]) -> None:
        """Record a step's metrics (device arrays), and show progress."""
        self.step = step
        if self._is_careful():
            jax.block_until_ready(metrics)
        self.recorder.add(step, metrics, self.programs and self.programs.last)
        phases.step_done(step)
        self.progress.advance(step, step_s=self.recorder.last_step_s())

    def _is_careful(self) -> bool:
        """Whether starts before this one have ended soon, and this one has not saved yet."""
        return self.crash_loop.is_careful() and self.saved_step <= self.crash_loop.highest

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        """Write one line of metrics; with several datasets it includes each one's realised share of the rows so far."""
        shares = self.feed.proportions()
        mixed = {f"data/share/{name}": share for name, share in shares.items()} if len(shares) > 1 else {}
        memory = fullest_device()
        self.last_metrics = {**values, **mixed, **self.feed.metrics(), **(memory.metrics() if memory else {})}
        if self.goodput is not None:
            self.last_metrics = {**self.last_metrics, **self.goodput.metrics()}
            self.goodput.write(step, if_due=True)
        self.metrics.log(step, self.last_metrics)
        self.progress.report(self.last_metrics)
        if self.device_speed is not None and not self.profiler.is_tracing and self.device_speed.look():
            self.recorder.lateness.pause()  # that was no lateness
        told = session.told_times()
        for line in (*self.slow_hosts.look(told, values["time/step_s"] or 0.0), *self.slow_devices.look(told)):
            logger.warning("%s", line)
        for sentence in self.trainer.objective.warnings(values):
            if sentence not in self.warned:
                self.warned.add(sentence)
                logger.warning("step %d: %s", step, sentence)
        self.feed.tune(step_s=values["time/step_s"] or 0.0, wait_s=values["data/wait_s"] or 0.0)

    def catch_up(self, state: TrainState) -> bool:
        """Do what the start before this one missed: the copy of a local save, and an evaluation.

        Also evaluates before the first step. Returns whether it evaluated.
        """
        step = int(state.step)
        if self.checkpoints.copy_is_missing and self.save_is_due(step):
            self.save(step, state)
        if not self.evaluation_is_due(step) or step in [line["step"] for line in self.history]:
            return False
        with phase("evaluating", abandonable=True):
            return self.evaluate(step, state)

    def evaluation_is_due(self, step: int) -> bool:
        """Whether the state of this step is evaluated: the first one, the last one, and at the interval."""
        interval = self.experiment.eval.interval
        return step in (0, self.experiment.num_train_steps) or bool(interval and step % interval == 0)

    def save_is_due(self, step: int) -> bool:
        """Whether the state of this step is saved in the run directory: the last one, at the interval, the best."""
        experiment = self.experiment
        return step == experiment.num_train_steps or step % experiment.save_interval == 0 or self._best_is_due(step)

    def _best_is_due(self, step: int) -> bool:
        """Whether the state of this step is saved because its held-out loss is the lowest so far."""
        if not self.experiment.save_best or step == 0:
            return False
        lowest = lowest_loss(self.history)
        return lowest is not None and lowest.step == step and self.feed.can_be_saved

    def local_save_is_due(self, step: int) -> bool:
        """Whether the state of this step is saved on the hosts' own disks, if not in the run directory anyway."""
        local = self.experiment.local_checkpoints
        return local.dir is not None and step % local.interval == 0

    @phase("evaluating")
    def evaluate(self, step: int, state: TrainState) -> bool:
        """Evaluate, write the results, and consider the checkpoint as the best.

        Returns False if a requested stop interrupted it; a resumed run catches up.
        """
        started = time.perf_counter()
        values = self.evaluator(state)
        if values is None:
            return False
        if not values:
            return True
        self.metrics.log(step, {**values, "time/evaluation_s": time.perf_counter() - started})
        self._account(step)
        self.history.append({"step": step, **values})
        if "val/loss" in values:
            self.checkpoints.note_metric(step, held_out_loss(values))
            self._tell_unsaved(step)
        return True

    def _tell_unsaved(self, step: int) -> None:
        """Log that the lowest held-out loss so far is that of a step between two saves."""
        lowest = lowest_loss(self.history)
        saved = self.save_is_due(step) or self.checkpoints.step_dir(step).exists()
        if lowest and lowest.step == step and not saved:
            logger.info("step %d has the lowest held-out loss so far and is not saved%s", step, self._advice())

    def _tell_best(self) -> None:
        """Log the step of the lowest held-out loss, if no checkpoint of that step is `best`."""
        lowest, best = lowest_loss(self.history), self.checkpoints.best
        if lowest is None or (best and best.step == lowest.step):
            return
        logger.log(
            # A run that was stopped before its end goes on, and says nothing yet.
            logging.WARNING if self.step >= self.experiment.num_train_steps else logging.INFO,
            "the lowest held-out loss, %.4f, was that of %s; %s",
            lowest.value,
            f"step {lowest.step}, of which there is no checkpoint{self._advice()}"
            if lowest.step
            else "the weights that the run began with",
            f"`best` is step {best.step} with {best.value:.4f}" if best else "there is no `best`",
        )

    def _advice(self) -> str:
        """Advice for saving every evaluated step, if not all are saved."""
        saves, evaluations = self.experiment.save_interval, self.experiment.eval.interval
        if evaluations % saves == 0:
            return ""
        return (
            f" (--save-best saves such a step; every evaluated step is saved if --save-interval, {saves}, divides "
            f"--eval.interval, {evaluations})"
        )

    @phase("saving")
    def save(self, step: int, state: TrainState, *, is_last: bool = False) -> bool:
        """Start saving a checkpoint; False if that, or the save before it, has failed, with a warning.

        A run that stops (`is_last`) ends with the error of this save, another one if several have failed in a row.
        """
        try:
            if self.checkpoints.finish_former():
                self.failed_saves = 0
        except (CheckpointError, StorageError) as error:
            self._go_on_without(error, ends_run=not is_last and self.failed_saves + 1 >= _MOST_FAILED_SAVES)
        try:
            stall_s = self.checkpoints.save(
                state, norm_stats=self.data.norm_stats_json(), files=self.data.token_files, **self._saved_with()
            )
        except (CheckpointError, StorageError) as error:  # on every process
            self._go_on_without(error, ends_run=is_last or self.failed_saves + 1 >= _MOST_FAILED_SAVES)
            return False
        if self._is_careful():
            self.checkpoints.wait()
        self.saved_step = step
        self.feed.reads_ahead = not self._is_careful()
        status.tell(saved_step=step)
        logger.info("saving checkpoint %d in %s (held up the loop for %.2f s)", step, self.directory, stall_s)
        self.metrics.log(step, {"time/checkpoint_stall_s": stall_s})
        self._account(step)
        return True

    def _go_on_without(self, error: RunError, *, ends_run: bool) -> None:
        """Count a failed save, and warn of it or raise its error."""
        if ends_run:
            raise error
        self.failed_saves += 1
        logger.warning("%s. The run goes on without it; it ends after %d such in a row", error, _MOST_FAILED_SAVES)

    @phase("saving locally")
    def save_locally(self, step: int, state: TrainState) -> None:
        """Start saving only on the hosts' own disks."""
        stall_s = self.checkpoints.save_locally(state, **self._saved_with())
        if stall_s is None:
            return
        place = self.experiment.local_checkpoints.dir
        status.tell(saved_step=step)
        logger.info("saving checkpoint %d in %s on each host (held up the loop for %.2f s)", step, place, stall_s)
        self.metrics.log(step, {"time/local_checkpoint_stall_s": stall_s})
        self._account(step)

    def _account(self, step: int) -> None:
        """Write where the run's time went until now, with the state of this step."""
        if self.goodput is not None:
            self.goodput.write(step)

    def _saved_with(self) -> dict[str, Any]:
        return {
            "data_position": self.feed.position(),
            "experiment": as_json(self.experiment),
            "extra": {
                "given": as_json(self.recorded),
                "wandb_id": self.metrics.wandb_id,
                "unread_metrics": self.recorder.unread(),
                "unwritten_metrics": self.metrics.unwritten(),
                "tokenizer": self.data.tokenizer,
                "text_length": self.data.text_length,
            },
        }

    def stop_requested(self) -> bool:
        """Whether all processes save and stop now."""
        return preempt.stop_requested()

    def close(self) -> None:
        """Wait for the last checkpoint, and close everything. Every process must call it."""
        self.profiler.close()
        self._tell_traced(self.step)
        self.checkpoints.close()
        self.feed.close()
        self.progress.close()
        self.metrics.close()

    @phase("finishing")
    def finish(self, keep_results: bool = False) -> None:
        """`close`, and write the results, unless `keep_results` and there are some. Every process must call it."""
        self.close()
        bad_records = sum(agree.gather("count bad records", self.feed.bad_records))
        path = self.directory / "results.json"
        if jax.process_index() == 0 and not (keep_results and path.exists()):
            fencing.require_owned(self.directory)
            self._tell_best()
            patiently(lambda: self._write_results(path, bad_records), f"writing {path}")
        if self.goodput is not None:
            self.goodput.write(self.step, is_end=self.step >= self.experiment.num_train_steps)
            logger.info("%s", self.goodput.words())

    def _write_results(self, path: Path, bad_records: int) -> None:
        write_results(
            path,
            self.experiment,
            self.trainer.plan,
            step=self.step,
            seconds=time.perf_counter() - self.started,
            last_metrics=self.last_metrics,
            evaluations=self.history,
            checkpoints=self.checkpoints.steps(),
            best=self.checkpoints.best,
            proportions=self.feed.proportions(),
            bad_records=bad_records,
        )
        if self.experiment.rl is not None:
            write_iterations(self.directory)
