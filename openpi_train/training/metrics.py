"""Writes a run's metrics on process 0: always `metrics.jsonl`, TensorBoard and wandb if requested.

A number comes from what `Objective.loss` returns, from `Trainer.step` (`step.py`: of the update), from `Recorder`
(`recorder.py`: times and rates) or from `Run.log` (`run.py`: the feed, memory, goodput). docs/reference/metrics.md has
each. Read next: `progress_report.py` (the same numbers on the terminal).
"""

import importlib
import importlib.util
import itertools
import json
import logging
import math
import netrc
import os
import pathlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from openpi_train.checkpoints import fencing
from openpi_train.data.core.files import lines_from_the_end, lines_of
from openpi_train.json_object import JsonObject
from openpi_train.runtime.exits import CheckpointError, StorageError, UsageError, reported_as
from openpi_train.runtime.passing_errors import patiently
from openpi_train.runtime.patient_file import PatientFile
from openpi_train.runtime.private_file import warn_if_others_can_read

logger = logging.getLogger(__name__)


class Writer(Protocol):
    """A destination of metrics."""

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        """Record the values of one optimizer step."""
        ...

    def close(self) -> None:
        """Write pending data, and close."""
        ...


class MetricWriters:
    """The run's metric writers; on every process but 0 it does nothing.

    Args:
        directory: the run directory.
        resume_step: the step that the run continues from, 0 for a new run. Lines of later steps (for 0: all
                lines),
            which a killed process wrote after its last checkpoint, are moved to `metrics.superseded.jsonl`, so each
            step occurs once.
        tensorboard: also write event files to `<directory>/tensorboard`.
        wandb_project: also write to wandb, under one run id for all resumes; None for not.
        wandb_config: what wandb shows as the run's configuration.
        unwritten: lines that a start before this one could not write; those that are not there are appended.
        epoch_of: also write `logs.json.txt`, with the epoch of the step of this index (both from 0); None for not.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        process_index: int,
        resume_step: int = 0,
        tensorboard: bool = False,
        wandb_project: str | None = None,
        wandb_config: JsonObject | None = None,
        epoch_of: Callable[[int], int] | None = None,
        unwritten: Sequence[str] = (),
    ):
        self._lines: JsonLines | None = None
        self._writers: list[Writer] = []
        self.wandb_id: str | None = None
        self._directory = path = pathlib.Path(directory)
        if process_index != 0:
            return
        fencing.require_owned(path)
        if tensorboard:
            self._writers.append(TensorBoard(path / "tensorboard", resume_step))
        if wandb_project is not None:
            wandb = Wandb(path, wandb_project, wandb_config or {})
            self.wandb_id = wandb.run_id
            self._writers.append(wandb)
        if epoch_of is not None:
            self._writers.append(LogsJson(path / "logs.json.txt", resume_step, epoch_of))
        self._lines = JsonLines(path / "metrics.jsonl", resume_step, unwritten)
        self._writers.append(self._lines)

    def unwritten(self) -> list[str]:
        """Lines that are not in `metrics.jsonl` yet, because the file cannot be written for now."""
        return [] if self._lines is None else list(self._lines.unwritten)

    def log(self, step: int, values: JsonObject) -> None:
        """Record named numbers (Python, numpy or host-readable jax scalars) of one optimizer step; None means
        unknown. Raises UsageError, and writes nothing, if a newer start owns the run."""
        if self._writers:
            fencing.require_owned_if_readable(self._directory)
        numbers = {
            name: value if value is None or isinstance(value, int) else float(value) for name, value in values.items()
        }
        for writer in self._writers:
            writer.log(step, numbers)

    def close(self) -> None:
        """Flush and close everything."""
        for writer in self._writers:
            writer.close()


class JsonLines:
    """One JSON object per line, flushed at once, with every digit.

    Reading a number back gives the same bits. NaN, Infinity and -Infinity, unknown to JSON, are strings of that name.
    """

    def __init__(self, path: pathlib.Path, resume_step: int = 0, unwritten: Sequence[str] = ()):
        self.unwritten: list[str] = []
        with reported_as(CheckpointError):
            patiently(lambda: _cut_after(path, resume_step or -1), f"reading {path}")
            self._file = PatientFile(path)
            last = patiently(lambda: _last_lines(path, len(unwritten)), f"reading {path}")
        for line in unwritten:
            if line not in last:
                self._append(line)

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        """Append a line."""
        line = {"step": step} | {name: json_number(value) for name, value in values.items()}
        self._append(json.dumps(line, allow_nan=False) + "\n")

    def _append(self, line: str) -> None:
        self.unwritten.append(line)
        self._file.write(line)
        if self._file.problem is None:
            self.unwritten.clear()

    def close(self) -> None:
        """Close the file, if need be after minutes of trying to write what is left.

        Raises CheckpointError, with the lines, where the disk is still too full for them, StorageError where it fails.
        """
        cause: BaseException | None = None
        try:
            patiently(self._file.require_written, f"writing {self._file.path}")
        except (OSError, StorageError) as error:
            cause = error
        left = self._file.close().decode()
        if left:
            kind = StorageError if isinstance(cause, StorageError) else CheckpointError
            raise kind(
                f"{self._file.path}: {len(left.splitlines())} lines could not be written ({self._file.problem}). The "
                f"last checkpoint is whole. Free some space, and append them if you need them:\n{left.rstrip()}"
            ) from cause


# The name there, and our names, of which the first known one is used.
_LOGS_JSON = {
    "train_loss": ("loss",),
    "lr": ("learning_rate",),
    "val_loss": ("val/loss_ema", "val/loss"),
    "train_action_mse_error": ("train/action_mse_ema", "train/action_mse"),
    "val_action_mse_error": ("val/action_mse_ema", "val/action_mse"),
}


class LogsJson:
    """`logs.json.txt`: JSON lines with the names of diffusion_policy's log, for programs that read it.

    One line per log interval and per evaluation, of the averaged weights if the run keeps an average.
    `global_step` and `epoch` count from 0.
    """

    def __init__(self, path: pathlib.Path, resume_step: int, epoch_of: Callable[[int], int]):
        self._lines, self._epoch_of = JsonLines(path, resume_step), epoch_of

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        """Append a line if any of the values has a name there."""
        known = {
            theirs: next(values[name] for name in ours if name in values)
            for theirs, ours in _LOGS_JSON.items()
            if any(name in values for name in ours)
        }
        if known:
            index = max(step - 1, 0)
            self._lines.log(step, {**known, "global_step": index, "epoch": self._epoch_of(index)})

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def require_writers(*, tensorboard: bool, wandb: bool) -> None:
    """Raise UsageError if a package for the requested files is not installed; called before anything is written."""
    asked = {("tensorboardX", "tensorboard"): tensorboard, ("wandb", "wandb-enabled"): wandb}
    for (package, flag), is_asked in asked.items():
        if is_asked and importlib.util.find_spec(package) is None:
            extra = flag.partition("-")[0]
            raise UsageError(
                f"--{flag} needs {package}: pip install 'openpi_train[{extra}]', or give --no-{flag} to do without"
            )


class TensorBoard:
    """Event files for TensorBoard."""

    def __init__(self, directory: pathlib.Path, resume_step: int = 0):
        from tensorboardX import SummaryWriter, record_writer

        # tensorboardX's own files raise when the disk is full, in its thread and in ours.
        record_writer.register_writer_factory("patient", _PatientFiles)
        purge = resume_step + 1 if resume_step else 0  # TensorBoard hides later steps of an earlier start
        with reported_as(CheckpointError):
            self._writer = SummaryWriter(f"patient:{directory}", purge_step=purge)

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        """Add a scalar per value."""
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class _PatientFiles:
    """tensorboardX's file factory for paths that begin with "patient:"."""

    @staticmethod
    def directory_check(place: str) -> None:
        """Make the folder."""
        pathlib.Path(place.partition(":")[2]).mkdir(parents=True, exist_ok=True)

    @staticmethod
    def open(place: str) -> PatientFile:
        """Open a new file."""
        return PatientFile(pathlib.Path(place.partition(":")[2]))


class Wandb:
    """A wandb run. Never prompts: without an API key it writes offline files, for `wandb sync`."""

    def __init__(self, directory: pathlib.Path, project: str, config: JsonObject):
        wandb = importlib.import_module("wandb")  # an extra that may be absent: no static import
        id_file = directory / "wandb_id.txt"
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(4) + "\n", encoding="utf-8")
        self.run_id = id_file.read_text(encoding="utf-8").strip()
        mode = os.environ.get("WANDB_MODE") or ("online" if _has_wandb_key() else "offline")
        if mode == "offline":
            logger.info("wandb: writing offline to %s/wandb (no API key, or WANDB_MODE says so)", directory)
        self._run: Any = wandb.init(
            project=project,
            name=directory.name,
            id=self.run_id,
            resume="allow",
            dir=str(directory),
            config=dict(config),
            mode=mode,
        )

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        """Log all values under the step."""
        self._run.log({name: value for name, value in values.items() if value is not None}, step=step)

    def close(self) -> None:
        """End the run."""
        self._run.finish()


# Keys that only lines of evaluations have.
_EVALUATED = ("val/", "success/")
_MARKS = tuple(f'"{name}'.encode() for name in _EVALUATED)


def read_evaluations(path: pathlib.Path, last_step: int) -> list[dict[str, Any]]:
    """The evaluations' results in a run's `metrics.jsonl` up to `last_step`; empty for a new run (step 0)."""
    if not last_step or not path.exists():
        return []
    found = []
    for _, text in lines_of(path):
        # A long run has a hundred thousand lines, of which few are of evaluations.
        if any(mark in text for mark in _MARKS) and _step_of(text) <= last_step:
            line = {name: _number(value) for name, value in json.loads(text).items() if _is_shown(name)}
            found += [line] if len(line) > 1 else []
    return found


def _is_shown(name: str) -> bool:
    return name == "step" or name.startswith(_EVALUATED)


def json_number(value: float | None) -> float | str | None:
    """The value in JSON: NaN and the infinities become strings of that name, which `float` reads."""
    if value is None or isinstance(value, int) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _number(value: object) -> Any:
    return float(value) if isinstance(value, str) else value


def _last_lines(path: pathlib.Path, count: int) -> list[str]:
    return [line.decode() for _, line in itertools.islice(lines_from_the_end(path), count)]


def _cut_after(path: pathlib.Path, step: int) -> None:
    """Move the lines of steps after `step`, and a torn last line, to `<stem>.superseded.jsonl`.

    Lines are in the order of their steps, so that only these, at the end, are read.
    """
    if not path.exists():
        return
    cut, kept_bytes, is_torn = [], 0, False
    for place, line in lines_from_the_end(path):
        if _step_of(line) <= step:
            kept_bytes, is_torn = place + len(line), not line.endswith(b"\n")
            break
        cut.append(line.rstrip(b"\n") + b"\n")
    if cut:
        side = path.with_name(path.stem + ".superseded.jsonl")
        with side.open("ab") as file:
            file.writelines(reversed(cut))
        os.truncate(path, kept_bytes)
        logger.info("moved %d metric lines of steps after %d to %s: they are trained again", len(cut), step, side.name)
    if is_torn:
        with path.open("ab") as file:
            file.write(b"\n")


def _step_of(line: bytes) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    # As wandb finds it. Named, since Python's `netrc` refuses its own default file where others can read it.
    file = pathlib.Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        found = netrc.netrc(file).authenticators("api.wandb.ai") is not None
        if found:
            warn_if_others_can_read(file, "wandb's key")
        return found
    except (OSError, netrc.NetrcParseError):
        return False
