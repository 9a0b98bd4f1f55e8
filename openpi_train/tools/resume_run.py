"""A run that goes on: its experiment is the one that it has recorded, and flags that are given replace its values.

Used by `--resume` and by the verb `resume`. Read next: `policy/experiment_json.py`, `training/rundir.py`.
"""

import dataclasses
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path

from openpi_train import registry
from openpi_train.checkpoints.checkpoint_formats import foreign
from openpi_train.command_line import RunFlags, parse_known
from openpi_train.experiment import Experiment
from openpi_train.fields import as_json, changed_fields
from openpi_train.policy.experiment_json import experiment_from_json, experiment_of_run
from openpi_train.runtime.exits import CheckpointError, UsageError
from openpi_train.tools.requests import ResumeRequest
from openpi_train.training.run_record import recorded_json, starts_of

logger = logging.getLogger(__name__)

# What belongs to one start and not to the run: a resume does not take it over.
OF_A_START = ("exp_name", "checkpoint_base_dir", "resume", "resume_from", "overwrite", "profile")
# The most lines of values that are told.
_TOLD = 30


def going_on(own: Experiment, argv: Sequence[str]) -> Experiment:
    """`own`, or what the run that the flags of `argv` continue has recorded in its place.

    `--resume-from` another run of this experiment takes over its values, too. All values that are not `own`'s are
    logged. A run that cannot be read here is warned of, and `own` is used.
    """
    flags = _flags(argv)
    if flags.overwrite or not (flags.resume or flags.resume_from):
        return own
    base = own.checkpoint_base_dir if flags.checkpoint_base_dir is None else flags.checkpoint_base_dir
    run = dataclasses.replace(own, exp_name=flags.exp_name or own.exp_name, checkpoint_base_dir=base).run_dir
    places = [run, *_other_run(flags.resume_from)]
    place = next((place for place in places if (place / "experiment.json").is_file()), None)
    found = None if place is None else _recorded(place, own)
    if place is None or found is None or found.name != own.name:
        return own
    found = dataclasses.replace(found, **{field: getattr(own, field) for field in OF_A_START})
    _tell(own, found, place, argv)
    return found


def of_several(name: str, argv: Sequence[str]) -> str:
    """`name`, or where it stands for several experiments the one whose run goes on: its dataset need not be given."""
    flags = _flags(argv)
    if not flags.resume and not flags.resume_from:
        return name
    for one in registry.alternatives(name):
        own = registry.load(one)
        base = own.checkpoint_base_dir if flags.checkpoint_base_dir is None else flags.checkpoint_base_dir
        if (Path(base) / own.name / flags.exp_name / "experiment.json").is_file():
            return one
    return name


def where_it_began(request: ResumeRequest, argv: Sequence[str]) -> tuple[ResumeRequest, list[str]]:
    """Go to the folder where the run was last started, so that all relative paths that it has recorded are those of it.

    Returns the request and the flags for there: paths that are given, and are here, become absolute. Where that folder
    is gone, nothing changes, and `experiment_of` warns.
    """
    run = Path(os.path.abspath(request.run.expanduser()))
    began = _last_folder(run)
    if began == Path.cwd() or not began.is_dir():
        return request, list(argv)
    file = request.experiment
    if file is not None and Path(file.partition(":")[0]).is_file():
        file = os.path.abspath(file)
    words = [_absolute(word) for word in argv]
    logger.info("the run goes on in %s, where it was started: its relative paths are those of that folder", began)
    os.chdir(began)
    return dataclasses.replace(request, run=run, experiment=file), words


def _absolute(word: str) -> str:
    """A flag's value, or `--flag=value`, that is a relative path of something here, as an absolute one."""
    flag, separator, value = word.partition("=") if word.startswith("--") else ("", "", word)
    file, colon, name = value.partition(":")
    if os.sep not in file or os.path.isabs(file) or not os.path.exists(file):
        return word
    return f"{flag}{separator}{os.path.abspath(file)}{colon}{name}"


def experiment_of(request: ResumeRequest) -> Experiment:
    """The experiment of the run in this directory, which goes on. Raises UsageError or CheckpointError."""
    run = Path(os.path.abspath(request.run.expanduser()))
    if not (run / "experiment.json").is_file():
        if (run.parent / "experiment.json").is_file():
            raise UsageError(
                f"{request.run} is a checkpoint: give its run, and --resume-from {run.name} to go back to it"
            )
        what = foreign(run) or "A run is <base>/<experiment>/<name>; `runs` lists them"
        raise UsageError(f"{run} is no run: there is no experiment.json. {what}")
    started_in = _last_folder(run)
    like = registry.load(request.experiment, any_dims=True) if request.experiment else None
    left_out: list[str] = []
    found = experiment_of_run(recorded_json(run) or {}, run, like, left_out)
    _tell_left_out(run, left_out)
    if found.name != run.parent.name:
        raise UsageError(
            f"{request.run} is a run of {found.name}, and lies in a folder {run.parent.name}: a run goes on where it "
            f"began, in <base>/{found.name}/<name>; move it to such a folder"
        )
    if started_in != Path.cwd():
        logger.warning(
            "the run was last started in %s, which is not there; relative paths of its experiment, such as %s, are "
            "those of %s now",
            *(started_in, found.assets_base_dir, Path.cwd()),
        )
    base = run.parent.parent
    base = found.checkpoint_base_dir if Path(found.checkpoint_base_dir).absolute() == base else str(base)
    return dataclasses.replace(
        found,
        exp_name=run.name,
        checkpoint_base_dir=base,
        resume_from=None,
        resume=True,
        overwrite=False,
        profile=0,
    )


def _flags(argv: Sequence[str]) -> RunFlags:
    return parse_known(RunFlags, argv, "", add_help=False)[0]


def _recorded(place: Path, own: Experiment) -> Experiment | None:
    """What is recorded there; None, with a warning, if a part of it is of a kind that is not here any more."""
    value, left_out = recorded_json(place), list[str]()
    if value is None:
        return None
    try:
        found = experiment_from_json(value, own, left_out)
    except CheckpointError as error:
        logger.warning("the run goes on with the flags that are given alone: %s", error)
        return None
    _tell_left_out(place, left_out)
    return found


def _tell_left_out(place: Path, left_out: Sequence[str]) -> None:
    if left_out:
        logger.warning(
            "%s has fields that this version of openpi_train has not, which are left out: %s",
            *(place / "experiment.json", ", ".join(left_out)),
        )


def _other_run(word: str | None) -> list[Path]:
    """The run at the path of `--resume-from`, or around the checkpoint there; none if it is no path."""
    if word is None or word.isdecimal() or word in ("best", "latest"):
        return []
    path = Path(word).expanduser().resolve()
    return [path, path.parent]


def _last_folder(run: Path) -> Path:
    """The folder where the run was last started; the present one if it is not recorded."""
    return next((folder for _, folder in starts_of(run)), Path.cwd())


def _tell(own: Experiment, found: Experiment, place: Path, argv: Sequence[str]) -> None:
    """Log the run's values that are not those of the experiment of its name, without those that a flag replaces."""
    words = [word.partition("=")[0][2:].replace("-", "_") for word in argv if word.startswith("--")]
    # `--no-tensorboard`, `--model.no-pi05`
    given = {*words, *(re.sub(r"(^|\.)no_", r"\1", word) for word in words)}
    changes = {
        name: values
        for name, values in changed_fields(as_json(own), as_json(found)).items()
        if name not in given and not name.startswith(tuple(f"{word}." for word in given))
    }
    if not changes:
        return
    lines = [f"  {name} {after!r} (the experiment alone: {before!r})" for name, (before, after) in changes.items()]
    more = [f"  and {len(lines) - _TOLD} more"] if len(lines) > _TOLD else []
    logger.info(
        "--resume: as in %s, where no flag says otherwise:\n%s",
        *(place / "experiment.json", "\n".join([*lines[:_TOLD], *more])),
    )
