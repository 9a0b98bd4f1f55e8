"""What a run's directory has recorded of its experiment. Read next: `rundir.py`, which writes it."""

import itertools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openpi_train.checkpoints.step_dirs import complete_steps
from openpi_train.data.core.files import read_json
from openpi_train.experiment import Experiment
from openpi_train.former_names import present_config
from openpi_train.runtime.exits import CheckpointError
from openpi_train.runtime.system_errors import passes

logger = logging.getLogger(__name__)

_told: set[Path] = set()  # damaged records that this process has warned of


def recorded_json(run: Path) -> Mapping[str, Any] | None:
    """The experiment of a run as `as_json` stores it, from `experiment.json`; None if there is no run.

    A damaged record, such as one that a power cut has emptied, is warned of: each checkpoint has the experiment, too.
    Raises CheckpointError if there is no checkpoint.
    """
    file = run / "experiment.json"
    if not file.is_file():
        return None
    try:
        return _checked(read_json(file))
    except ValueError as error:
        damage = error
    for step in reversed(complete_steps(run)):
        try:
            meta = read_json(run / str(step) / "meta.json")
            found = _checked(meta.get("given", meta["experiment"]))  # an older run's: as settled
        except (FileNotFoundError, ValueError, LookupError, TypeError):
            continue
        if file not in _told:
            logger.warning("%s cannot be read (%s): the experiment is that of checkpoint %d", file, damage, step)
            _told.add(file)
        return found
    raise CheckpointError(f"{file} cannot be read ({damage}); put a copy back") from damage


def _checked(value: object) -> Mapping[str, Any]:
    """The value with its present names. Raises ValueError if it is of no experiment."""
    if not isinstance(value, Mapping) or value.get("__class__") != Experiment.__name__:
        raise ValueError("it is no record of an experiment")
    return present_config(value)


def starts_of(run: Path) -> list[tuple[list[str], Path]]:
    """The words after the program, and the folder where they were typed, of every start of a run, the last one first.

    None are returned if they are not recorded, or the record is damaged. Raises OSError if that may pass.
    """
    try:
        starts = read_json(run / "environment.json")["starts"]
        return [(list(start["argv"][1:]), Path(start["directory"])) for start in reversed(starts)]
    except (OSError, ValueError, LookupError, TypeError) as error:
        if passes(error):
            raise
        return []


def own_experiment(run: Path) -> str | None:
    """The `file.py:name` with which a run was started, with an absolute path; None if it was none.

    A start by `resume` names none, so the starts before it are asked, too. Files that are there come first.
    """
    named = [str(folder / word) for words, folder in starts_of(run) for word in _own_words(words)]
    return next((one for one in named if Path(one.partition(":")[0]).is_file()), named[0] if named else None)


def _own_words(words: Sequence[str]) -> list[str]:
    """The words of a command line that name an experiment in a file: its first, and that of `--experiment`."""
    first = words[1:2] if words[:1] == ["train"] else words[:1]
    given = [value for flag, value in itertools.pairwise(words) if flag == "--experiment"]
    given += [word.partition("=")[2] for word in words if word.startswith("--experiment=")]
    return [word for word in (*given, *first) if ".py:" in word]
