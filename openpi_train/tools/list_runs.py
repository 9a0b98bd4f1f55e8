"""The `runs` verb: a table of all runs below a folder, or the settings in which two of them differ.

Reads the runs' files only, so runs that are going on can be listed, too. Read next: `run_files.py`.
"""

import dataclasses
import difflib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from openpi_train.checkpoints.best import Best, lowest_loss
from openpi_train.data.core.files import json_text
from openpi_train.fields import changed_fields
from openpi_train.runtime import locks
from openpi_train.runtime.exits import UsageError
from openpi_train.runtime.waiting import duration
from openpi_train.tools.requests import RunsRequest
from openpi_train.tools.run_files import Missing, RunFiles
from openpi_train.training.metrics import json_number

# What every two runs differ in.
_OWN = ("exp_name", "resume", "resume_from", "overwrite")
_ENVIRONMENT = ("versions", "git", "devices", "process_count")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A line of the table. None: the run has not measured it. `age_s`: seconds since it last wrote metrics."""

    run: str
    path: str
    state: str
    step: int
    num_train_steps: int | None
    loss: float | None
    best: Best | None
    samples_per_s: float | None
    goodput: float | None
    success: float | None
    reward: float | None
    checkpoints: list[int]
    age_s: float


def main(request: RunsRequest) -> int:
    """Print the table, or the difference. Raises UsageError where a folder or a run is not there."""
    if not request.folder.is_dir():
        raise UsageError(f"{request.folder} is no folder: name the one that holds runs (--checkpoint-base-dir)")
    if request.diff is not None:
        runs = [_named(request.folder, word) for word in request.diff]
        _print_difference([_name(request.folder, run) for run in runs], difference(*runs), request.json)
        return 0
    found = sorted((summary(request.folder, run) for run in runs_below(request.folder)), key=lambda one: -one.age_s)
    if request.json:
        print(json_text([{**dataclasses.asdict(one), "loss": json_number(one.loss)} for one in found]), end="")
    elif found:
        print("\n".join(_table(found)))
    else:
        print(f"there are no runs below {request.folder}")
    return 0


def runs_below(folder: Path) -> list[RunFiles]:
    """Every run in the folder or below it; what lies in a run is none."""
    found = []
    for path, folders, files in os.walk(folder):
        if "experiment.json" in files:
            found.append(RunFiles(Path(path).resolve()))
            folders.clear()
    return found


def summary(folder: Path, run: RunFiles) -> RunSummary:
    """A run's line in the table of this folder."""
    evaluations = [
        line for line in run.metrics if isinstance(line.get("val/loss_ema", line.get("val/loss")), int | float)
    ]
    return RunSummary(
        run=_name(folder, run),
        path=str(run.path),
        state=state_of(run),
        step=run.step,
        num_train_steps=_or_none(lambda: run.experiment["num_train_steps"]),
        loss=run.newest("loss"),
        best=lowest_loss(evaluations),
        samples_per_s=run.newest("samples_per_s"),
        goodput=run.goodput,
        success=run.last("success/all") if run.last("success/all") is not None else run.last("rl/success"),
        reward=run.last("rl/reward"),
        checkpoints=run.checkpoints,
        age_s=max(time.time() - _written_at(run.path), 0.0),
    )


def state_of(run: RunFiles) -> str:
    """`running`: a process holds its lock. `ended`: it reached its last step. `stopped`: it was asked to, and saved.
    `interrupted`: it was killed, or failed.
    """
    if locks.is_held(run.path / ".lock"):
        return "running"
    if run.is_finished:
        return "ended"
    last = _or_none(lambda: run.json("results.json")["summary"]) or {}
    # Results of a start before the last one are of an earlier step.
    return "stopped" if last.get("stop_request") and last["step"] >= run.step else "interrupted"


def difference(one: RunFiles, other: RunFiles) -> dict[str, dict[str, tuple[Any, Any]]]:
    """The settings in which two runs differ, and what of the software and devices of their last starts does."""
    settings = changed_fields(one.experiment, other.experiment)
    starts = [_or_none(lambda run=run: run.json("environment.json")["starts"][-1]) or {} for run in (one, other)]
    first, second = ({name: start.get(name) for name in _ENVIRONMENT} for start in starts)
    return {
        "settings": {name: values for name, values in settings.items() if name not in _OWN},
        "environment": changed_fields(first, second),
    }


def _named(folder: Path, word: str) -> RunFiles:
    """The run at this path, or of this name in the table; the last part of a name is enough if no other run has it."""
    if (Path(word) / "experiment.json").is_file():
        return RunFiles.at(Path(word))
    names = {_name(folder, run): run for run in runs_below(folder)}
    found = [name for name in names if name == word or name.endswith(f"/{word}")]
    if word in names or len(found) == 1:
        return names[word if word in names else found[0]]
    if found:
        raise UsageError(f"{word} may be any of {', '.join(found)}: give the whole name")
    close = difflib.get_close_matches(word, [*names, *(name.rpartition("/")[2] for name in names)], n=3)
    near = [name for name in names if name in close or name.rpartition("/")[2] in close] or sorted(names)[:8]
    raise UsageError(f"there is no run {word} below {folder}; there are {', '.join(near) or 'none'}")


def _name(folder: Path, run: RunFiles) -> str:
    """The run's path in the folder; its own if it lies elsewhere, or if it is the folder."""
    base = folder.resolve()
    inside = run.path.is_relative_to(base) and run.path != base
    return run.path.relative_to(base).as_posix() if inside else run.name


def _written_at(path: Path) -> float:
    """When the run last wrote metrics, or else began, in seconds since the epoch."""
    file = path / "metrics.jsonl"
    return (file if file.is_file() else path / "experiment.json").stat().st_mtime


def _or_none(value: Callable[[], object]) -> Any:
    """The value; None where the run's files lack it."""
    try:
        return value()
    except (Missing, LookupError, TypeError):
        return None


def _table(found: Sequence[RunSummary]) -> list[str]:
    """The lines of the table, without columns of what no run has measured."""
    rows = [_cells(one) for one in found]
    optional = {name for name in ("goodput", "success", "reward") if all(row[name] == "-" for row in rows)}
    head = [name for name in rows[0] if name not in optional]
    return _aligned([head, *([row[name] for name in head] for row in rows)])


def _best(best: Best) -> str:
    """The lowest held-out loss and its step; before the first step there is no checkpoint `best`."""
    return f"{best.value:.4f} at {best.step}{'' if best.step else ' (untrained)'}"


def _cells(one: RunSummary) -> Mapping[str, str]:
    return {
        "run": one.run,
        "state": one.state,
        "step": f"{one.step}/{'?' if one.num_train_steps is None else one.num_train_steps}",
        "loss": _number(one.loss, ".4f"),
        "best": "-" if one.best is None else _best(one.best),
        "samples/s": _number(one.samples_per_s, ".1f"),
        "goodput": _number(one.goodput, ".0%"),
        "success": _number(one.success, ".0%"),
        "reward": _number(one.reward, ".3f"),
        "written": f"{duration(one.age_s)} ago",
    }


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _print_difference(
    names: list[str], found: Mapping[str, Mapping[str, tuple[object, object]]], as_json: bool
) -> None:
    if as_json:
        print(json_text(found), end="")
        return
    if not any(found.values()):
        print(f"{names[0]} and {names[1]} do not differ")
        return
    settings = [[_flag(name), *map(_value, values)] for name, values in found["settings"].items()]
    others = [[name, *map(_value, values)] for name, values in found["environment"].items()]
    print(
        "\n".join(_aligned([["setting", *names], *settings, *([["environment", "", ""], *others] if others else [])]))
    )


def _flag(field: str) -> str:
    """The flag of a field, by its path in experiment.json."""
    return f"--{field.replace('_', '-')}" if "__class__" not in field else field.removesuffix(".__class__")


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines, whose columns begin below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return [line.rstrip() for line in lines]
