"""Tells what was edited in an experiment since its run was started, and the flags with which the run takes it.

The words of the run's first start make an experiment once more, from the files of today. Where it differs from what the
run has recorded, and no flag has said so since, a file was edited. Read next: `resume_run.py`.
"""

import contextlib
import io
import logging
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from openpi_train.command_line import RunFlags, parse_fields, parse_known
from openpi_train.data.core.files import read_json
from openpi_train.experiment import Experiment
from openpi_train.fields import as_json, changed_fields, resume_verdict
from openpi_train.json_object import JsonObject
from openpi_train.tools.resume_run import OF_A_START
from openpi_train.training.run_record import recorded_json

logger = logging.getLogger(__name__)

# The most lines of edits that are told.
_TOLD = 30
_HIDDEN = "<hidden>"  # a secret in a recorded command line


def tell_edits(found: Experiment, typed: Callable[[list[str]], Experiment]) -> None:
    """Warn of every field of `found`, a run that goes on, that its experiment says otherwise today.

    `typed` makes an experiment of a training command line. Where that fails (a file is gone) it is logged.
    """
    said = recorded_json(found.run_dir) if found.resume else None
    starts = _starts(found.run_dir) if said is not None else []
    words = _words(starts[0]) if starts else []
    if said is None or not words:
        return
    try:
        with _unnoticed():
            today = typed(words)
    except (Exception, SystemExit) as error:
        logger.info("whether the experiment was edited since the start is not known: %s", error or type(error).__name__)
        return
    if edits := _edits(found, today, said, starts):
        _tell(found, as_json(today), edits)


def _edits(found: Experiment, today: Experiment, said: JsonObject, starts: Sequence[Any]) -> list[str]:
    """The fields that a file says otherwise today, by path; those that flags have set are none."""
    value, new = as_json(found), as_json(today)
    by_flags = [name for start in starts for name in start.get("changed", ())]
    chosen = [*OF_A_START, *changed_fields(said, value), *by_flags]
    # What epochs are in steps a start finds, from its data: only their number is compared.
    chosen += ["num_train_steps"] if today.num_epochs is not None else []
    names = [name for name in changed_fields(value, new) if not any(_meet(name, other) for other in chosen)]
    # Of another class the fields are others, too: it alone is told.
    classes = [name for name in names if name.endswith("__class__")]
    inside = {
        name for name in names for one in classes if name != one and name.startswith(one.removesuffix("__class__"))
    }
    return list(dict.fromkeys(_field(name) for name in names if name not in inside and _at(new, name) != _HIDDEN))


def _tell(found: Experiment, today: object, edits: Sequence[str]) -> None:
    value = as_json(found)
    lines = []
    for name in edits[:_TOLD]:
        before, after = _at(value, name), _at(today, name)
        lines.append(f"  {name}: {before!r} in the run, {after!r} today: {_remedy(found, name, before, after)}")
    lines += [f"  and {len(edits) - _TOLD} more"] if len(edits) > _TOLD else []
    logger.warning(
        "the experiment of %s was edited since the run was started, or a file that its command line names. The run "
        "keeps the values that it was started with; it takes a new one as a flag:\n%s",
        *(found.run_dir, "\n".join(lines)),
    )


def _remedy(found: Experiment, name: str, before: Any, after: Any) -> str:
    """What to type so that the run has the new value of a field."""
    if resume_verdict(found, name, before, after) == "refuse":
        return "a run cannot change it; train it under another --exp-name"
    words = [name.replace("_", "-").removesuffix(".--class--")]
    if name == "optimizer.__class__":
        words.append(after.lower())
    elif isinstance(after, bool):
        *parents, last = words[0].split(".")
        words = [".".join([*parents, last if after else f"no-{last}"])]
    else:
        words += [str(one) for one in after] if isinstance(after, list) else [str(after)]
    words[0] = f"--{words[0]}"
    try:
        with _unnoticed():
            taken = parse_fields(Experiment, found, words, "resume", "")
    except (Exception, SystemExit):
        taken = found
    if _at(as_json(taken), name) == after:
        return shlex.join(words)
    return "no flag takes it; give the edited experiment another name, and begin its run here with --resume-from RUN"


def _starts(run: Path) -> list[Any]:
    """The record of each start; empty if it is not there, or not as ours."""
    try:
        return read_json(run / "environment.json")["starts"]
    except (OSError, ValueError, LookupError, TypeError):
        return []


def _words(start: JsonObject) -> list[str]:
    """The command line of a start, without what belongs to that start alone; empty where that is not known.

    A run that began with another run's values has no line of its own.
    """
    program, *words = start["argv"]
    if Path(program).name == "main.py":  # `scripts/main.py`
        words = ["posttrain", *words]
    if words[:1] == ["train"]:
        words = words[1:]
    if not words or words[0] == "resume":
        return []
    flags, rest = parse_known(RunFlags, words[1:], words[0], add_help=False)
    if flags.resume_from is not None:
        return []
    file = words[0].partition(":")[0]
    first = os.path.join(start["directory"], words[0]) if file.endswith(".py") else words[0]
    return [first, "--exp-name", "x", *rest]


def _field(name: str) -> str:
    """The field that has a flag: of numbers in a tuple, the tuple's."""
    parent, _, last = name.rpartition(".")
    return _field(parent) if last.isdecimal() else name


def _at(value: object, name: str) -> Any:
    """The value at this path of nested JSON values; None if it has no such path."""
    for part in name.split("."):
        if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        elif isinstance(value, Mapping):
            value = value.get(part)
        else:
            return None
    return value


def _meet(one: str, other: str) -> bool:
    """Whether two paths are the same, or one lies in the other."""
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


@contextlib.contextmanager
def _unnoticed() -> Iterator[None]:
    """Nothing is logged, printed or left in the environment meanwhile."""
    variables, level = dict(os.environ), logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(level)
        os.environ.clear()
        os.environ.update(variables)
