"""Which checkpoint a run continues from, and where its data stood. Read next: `start.py`, which restores it."""

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openpi_train.checkpoints.checkpoint_formats import foreign
from openpi_train.checkpoints.step_dirs import best_of, complete_steps
from openpi_train.data.core.files import read_json
from openpi_train.experiment import Experiment
from openpi_train.interop.manifest import has_manifest
from openpi_train.runtime.exits import CheckpointError, UsageError
from openpi_train.training.run_record import recorded_json


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """`step`: a checkpoint of the run itself; `other`: the directory of another run's. Neither: the run's newest."""

    step: int | None = None
    other: str | None = None


def resume_point(experiment: Experiment) -> ResumePoint:
    """Where the run continues from, by `resume_from`. Only reads.

    Raises UsageError, naming the steps that are there, if there is no such checkpoint.
    """
    word = experiment.resume_from
    if word is None:
        return ResumePoint()
    own, steps, best = experiment.run_dir, complete_steps(experiment.run_dir), best_of(experiment.run_dir)
    if word.isdecimal() and int(word) in steps:
        return ResumePoint(step=int(word))
    if word == "latest" and steps:
        return ResumePoint(step=steps[-1])
    if word == "best" and best is not None:
        return ResumePoint(step=best.step)
    path = Path(word).expanduser().resolve()
    if not word.isdecimal() and word not in ("latest", "best"):
        if steps and word == _recorded(own):  # a restart: the run has begun from there, which may be gone
            return ResumePoint(other=str(path))
        if path.is_dir():
            return _at(path, own.resolve(), word)
    there = f"there are steps {', '.join(map(str, steps))}" if steps else "there is no complete checkpoint"
    there += "" if best is None else f", of which {best.step} is the best"
    missing = f"there is no {path}, and " if os.sep in word and not path.exists() else ""
    raise UsageError(
        f"--resume-from {word}: {missing}{own} has no such checkpoint; {there}. Give one of its steps, best or "
        "latest, or the path of another run or of a checkpoint in it"
    )


def saved_position(checkpoint: Path) -> Mapping[str, Any] | None:
    """The position of the data (`Feed.position`) when this checkpoint of ours was saved; None if it does not say."""
    with contextlib.suppress(OSError, ValueError):
        return read_json(checkpoint / "meta.json").get("data_position")
    return None


def begun(experiment: Experiment) -> tuple[int, Mapping[str, Any]] | None:
    """The step from which the run goes on and the position of its data there; None if it begins. Only reads."""
    if not experiment.resume:
        return None
    point, steps = resume_point(experiment), complete_steps(experiment.run_dir)
    step = point.step if point.step is not None else (steps[-1] if steps else None)
    where = Path(point.other) if step is None and point.other is not None else experiment.run_dir / str(step)
    position = saved_position(where)
    return None if position is None or not where.name.isdecimal() else (int(where.name), position)


def _at(path: Path, own: Path, word: str) -> ResumePoint:
    """The checkpoint at the path, or the newest one of the run there."""
    if not has_manifest(path):
        steps = complete_steps(path)
        if not steps:
            what = foreign(path) or "this is neither a complete checkpoint (<run>/<step>) nor a run with one"
            raise UsageError(f"--resume-from {word}: {what}")
        path = path / str(steps[-1])
    return ResumePoint(step=int(path.name)) if path.parent == own else ResumePoint(other=str(path))


def _recorded(run: Path) -> str | None:
    """The `resume_from` of the run's last start."""
    with contextlib.suppress(OSError, CheckpointError):
        return (recorded_json(run) or {}).get("resume_from")
    return None
