"""The directory of a run: opened, never overwritten, with a record of each start.

    <checkpoint_base_dir>/<experiment>/<exp_name>/experiment.json    the experiment, as last started
                                                  environment.json   one entry per start: versions, devices, command

Read next: `checkpoints/checkpoint_store.py` (the step directories), `metrics.py`.
"""

import contextlib
import dataclasses
import difflib
import errno
import logging
import os
import pathlib
import platform
import re
import secrets
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from openpi_train.checkpoints import fencing
from openpi_train.checkpoints.checkpoint_formats import foreign
from openpi_train.data.core import hub
from openpi_train.data.core.files import read_json, set_aside, write_json
from openpi_train.experiment import Experiment
from openpi_train.fields import as_json, changed_fields, resume_verdict
from openpi_train.json_object import JsonObject
from openpi_train.launch.spec import SAVED_STEP_VARIABLE
from openpi_train.runtime import agree
from openpi_train.runtime.exits import CheckpointError, DataError, StorageError, UsageError
from openpi_train.runtime.passing_errors import is_of_surroundings, patiently
from openpi_train.runtime.versions import package_versions
from openpi_train.runtime.world import is_restart
from openpi_train.training import run_lock
from openpi_train.training.resume_point import resume_point
from openpi_train.training.run_record import recorded_json

logger = logging.getLogger(__name__)

_MARK, _MARK_TIMEOUT_S = ".shared", 10.0
_MOST_FOLDERS = 100  # in which a run of the same name, or of a close one, is looked for
_CLOSE_NAME = 0.8  # by difflib's ratio: one letter of five is wrong
_MAX_NAME_BYTES = 200  # file systems take 255, and `.replaced-<time>` comes behind
_RECORDED_VARIABLES = re.compile(
    r"(JAX|XLA|NCCL|CUDA|OMPI|OPENPI_TRAIN|TF_CPP|OMP|HF_HUB_OFFLINE|WANDB_MODE)(_.*)?"
    # Others of Slurm's may be secrets: SLURM_JWT.
    r"|SLURM_(JOB_.*|STEP_.*|RESTART_COUNT|PROCID|LOCALID|NODEID|NNODES|NTASKS.*|CPUS_.*|GPUS.*|MEM_.*)"
    r"|(LOCAL_|NODE_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)"
)
_SECRET = re.compile(r"(^|[-_.])(api[-_]?key|key|token|auth|jwt|cookie)$|secret|passw|credential", re.IGNORECASE)
# What gives access whatever it is called: JSON web tokens, and the keys of Hugging Face, GitHub, OpenAI, AWS, and of
# weights & biases (40 hexadecimal digits, as are git's commits, which are no words of ours); a password in an address.
_SECRET_VALUE = re.compile(
    r"\beyJ[\w-]{8,}\.[\w-]+|\bhf_\w{20,}|\bgh[pousr]_\w{20,}|\bgithub_pat_\w{20,}|\bsk-[\w-]{16,}|\b(AKIA|ASIA)[A-Z0-9]{16}\b"
    r"|^[0-9a-f]{40}$|://[^/\s:@]*:[^/\s@]+@"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunDir:
    """An opened run directory. `resumed`: it existed before. `replaced`: where an older run was moved to."""

    path: pathlib.Path
    resumed: bool = False
    replaced: pathlib.Path | None = None


def check_run(given: Experiment) -> None:
    """Check what `open_run` would refuse, and log what a resume changes, without writing: a start that fails later
    leaves no trace.

    Every process must call it. Raises UsageError, on every process.
    """
    problem = ""
    if agree.process_index() == 0:
        try:
            _, changes = patiently(lambda: _inspect(given), f"looking at {given.run_dir}")
            _tell_changes(given, changes)
            tell_beginning(given)
        except UsageError as error:
            problem = str(error)
    if problem := agree.broadcast("check the run directory", problem):
        raise UsageError(problem)


def check_folder(given: Experiment) -> None:
    """Check what `open_run` would refuse, in this process alone, and that the run's folder can be written. Nothing is
    logged, and no file stays.

    Raises UsageError.
    """
    if given.exp_name:  # else `Experiment.check` says so
        patiently(lambda: _inspect(given), f"looking at {given.run_dir}")
    if is_restart(os.environ):  # it could be written at the first start
        return
    there = _nearest_folder(given.run_dir)
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise _unusable(given, error) from error


def open_run(
    given: Experiment,
    *,
    process_index: int | None = None,
    broadcast: Callable[[str, Any], Any] = agree.broadcast,
) -> RunDir:
    """Create or find the run's directory. Every process must call it; process 0 acts.

    With `resume` the run is continued if no field that it depends on has changed (`fields.py: OnResume`), and its
    record is unchanged until `record_start`. Else it is moved to `<exp_name>.replaced-<time>`, where that is asked for
    by `overwrite` or no step of it is recorded or saved. None is deleted.

    Args:
        given: the experiment as given, before it is fitted to devices and data.
        process_index: this process's index; None: jax's.
        broadcast: sends process 0's JSON value to all processes, given a name for the agreement.

    Raises:
        UsageError: on every process, if flags and directory do not match.
    """
    index = jax.process_index() if process_index is None else process_index
    answer: dict[str, Any] = {}
    if index == 0:
        try:
            run = patiently(lambda: _open(given), f"opening {given.run_dir}")
            replaced = str(run.replaced) if run.replaced else None
            answer = {"path": str(run.path), "resumed": run.resumed, "replaced": replaced, "mark": _mark(run.path)}
        except UsageError as error:
            answer = {"error": str(error)}
        except OSError as error:
            if is_restart(os.environ) and is_of_surroundings(error):
                raise StorageError(
                    f"{given.run_dir} could be used before this restart, and cannot now ({error}): look at its file "
                    "system, and start again with --resume"
                ) from error
            answer = {"error": str(_unusable(given, error))}
    answer = broadcast("open the run directory", answer)
    if "error" in answer:
        raise UsageError(answer["error"])
    path = pathlib.Path(answer["path"])
    if not _sees(path / _MARK, answer["mark"]):
        raise UsageError(
            f"process {index} on {platform.node()} does not see what process 0 has just written to {path}: each host "
            "has a directory of its own there; --checkpoint-base-dir must lie on a file system that all hosts share"
        )
    replaced = pathlib.Path(answer["replaced"]) if answer["replaced"] else None
    return RunDir(path=path, resumed=answer["resumed"], replaced=replaced)


def _unusable(given: Experiment, error: OSError) -> UsageError:
    why = error.strerror or error
    return UsageError(f"--checkpoint-base-dir {given.checkpoint_base_dir} cannot be written ({why}); choose another")


def _nearest_folder(path: pathlib.Path) -> pathlib.Path:
    """The path, or the nearest of the folders that it would lie in, that is there."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _mark(path: pathlib.Path) -> str:
    """Write a unique word, to detect a different directory of the same path on another host's disk."""
    word = secrets.token_hex(8)
    (path / _MARK).write_text(word, encoding="utf-8")
    return word


def _sees(path: pathlib.Path, word: str) -> bool:
    """Whether the word is visible; network file systems may show a new file some seconds late."""
    deadline = time.monotonic() + _MARK_TIMEOUT_S
    while True:
        with contextlib.suppress(OSError):
            if path.read_text(encoding="utf-8") == word:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)


def begins(given: Experiment) -> bool:
    """Whether the run begins with its start weights, and not with a checkpoint of its own or of another run."""
    return given.resume_from is None and not (given.resume and (given.run_dir / "experiment.json").is_file())


def devices_at_first(given: Experiment) -> int | None:
    """The number of devices at the first start of the run that `given` continues; None for a new run. All call it."""
    starts = _starts(given)
    return agree.broadcast("devices at the first start", starts[0]["devices"]["count"] if starts else None)


def last_devices(given: Experiment) -> dict[str, int] | None:
    """The numbers of devices and processes of the last start of the run; None for a new run. All call it."""
    last = next(reversed(_starts(given)), None)
    found = last and {"devices": last["devices"]["count"], "processes": last["process_count"]}
    return agree.broadcast("devices at the last start", found)


def use_first_commits(given: Experiment) -> None:
    """Take from the hub what the run that `given` continues took at first, not what is newest. All must call it."""
    recorded: dict[str, str] = {}
    for start in reversed(_starts(given)):
        recorded |= start.get("hub", {})
    hub.pin(agree.broadcast("commits on the hub", recorded))


def _starts(given: Experiment) -> list[Any]:
    """The recorded starts of the run that `given` continues, on process 0; none for a new run, and elsewhere."""
    if agree.process_index() == 0 and given.resume:
        path = given.run_dir / "environment.json"
        with contextlib.suppress(OSError):  # no run yet, or an invalid name, which is reported later
            return patiently(lambda: _starts_in(path), f"reading {path}") or []
    return []


def check_commits() -> None:
    """Raise DataError if processes have taken different commits from the hub. Every process must call it."""
    everyone = agree.gather("commits on the hub", hub.commits())
    for index, other in enumerate(everyone):
        for name in sorted(other.keys() & everyone[0].keys()):
            if other[name] != everyone[0][name]:
                raise DataError(
                    f"{name} has changed on the hub during the start: it is {other[name]} on process {index}, "
                    f"{everyone[0][name]} on process 0. Start again, or give one with hub:USER/NAME@REVISION"
                )


def record_start(given: Experiment, measured: JsonObject) -> None:
    """Record the experiment and environment of this start in the opened directory. For process 0 only.

    `measured` has measurements of this start's devices, as JSON.
    """
    path, experiment = given.run_dir, as_json(given)
    fencing.require_owned(path)
    changes = _changes(given)
    try:
        starts = _starts_in(path / "environment.json")
    except FileNotFoundError:
        starts = []
    if starts is None:
        set_aside(path / "environment.json", "damaged")
    start = {
        **environment(),
        "hub": hub.commits(),
        **measured,
        "changed": {name: list(values) for name, values in changes.items()},
    }
    write_json(path / "environment.json", {"starts": [*(starts or ()), start]})
    write_json(path / "experiment.json", experiment)


def _starts_in(file: pathlib.Path) -> list[Any] | None:
    """The starts of an `environment.json`; None, with a warning, if it is damaged: nothing that is trained needs it."""
    try:
        return list(read_json(file)["starts"])
    except (ValueError, LookupError, TypeError) as error:
        logger.warning("%s cannot be read (%s): earlier starts and their commits on the hub are not known", file, error)
        return None


def environment() -> dict[str, Any]:
    """Where and how this process runs, without secrets."""
    devices = jax.devices()
    return {
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "argv": _without_secrets(sys.argv),
        "directory": os.getcwd(),
        "host": platform.node(),
        "process_count": jax.process_count(),
        "devices": {"count": len(devices), "kind": devices[0].device_kind, "platform": devices[0].platform},
        "versions": package_versions(),
        "git": _git_commit(),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if _RECORDED_VARIABLES.fullmatch(name) and not (_SECRET.search(name) or _SECRET_VALUE.search(value))
        },
    }


def _open(given: Experiment) -> RunDir:
    path = given.run_dir
    _inspect(given)  # nothing is written if this raises
    run_lock.hold(path)
    is_run, _ = _inspect(given)  # again: another start may have had it until now
    replaced = None
    if is_run and not given.resume:
        why = "--overwrite" if given.overwrite else "the start before this one has trained nothing"
        replaced = set_aside(path, "replaced")
        run_lock.hold(path)
        _inspect(dataclasses.replace(given, overwrite=False))  # another start may have been faster here, too
        logger.info("%s: the run that was in %s now lies in %s", why, path, replaced)
    resumed = is_run and given.resume
    if not resumed:
        write_json(path / "experiment.json", as_json(given))
    return RunDir(path=path, resumed=resumed, replaced=replaced)


def _tell_changes(given: Experiment, changes: Mapping[str, tuple[object, object]]) -> None:
    """Log how a run that goes on differs from what it was."""
    for name, (before, after) in changes.items():
        if name in ("resume", "resume_from", "overwrite"):
            continue
        if resume_verdict(given, name, before, after) == "accept":
            logger.info("resuming with %s %r (was %r)", name, after, before)
        else:
            logger.warning(
                "resuming with %s %r (was %r): from here on the run differs from an uninterrupted one",
                *(name, after, before),
            )
        if name == "num_train_steps" and (told := given.lr_schedule.lengthened(int(str(before)), int(str(after)))):
            logger.info("%s", told)


def tell_beginning(given: Experiment) -> None:
    """Log where --resume finds no run; warn if there is one of nearly this name, or of this name around the folder
    where it was typed.
    """
    here, base = pathlib.Path.cwd(), pathlib.Path(given.checkpoint_base_dir)
    path = given.run_dir
    if not given.resume or not given.exp_name or _is_there(path / "experiment.json"):
        return
    around = [] if base.is_absolute() else [*here.parents, *_folders_in(here)]
    others = (folder / base / given.name / given.exp_name for folder in around)
    found = [one for one in others if _is_there(one / "experiment.json")]
    if close := _of_close_name(path):
        logger.warning(
            "--resume: there is no run %s, so one begins there. Did you mean %s? It goes on with: "
            "python -m openpi_train resume %s",
            *(path, close.name, shlex.quote(str(close))),
        )
    elif found:
        logger.warning(
            "--resume: there is no run in %s, so one begins there. %s is a run of the same name: it goes on, from any "
            "folder, with: python -m openpi_train resume %s",
            *(path, found[0], shlex.quote(str(found[0]))),
        )
    else:
        logger.info(
            "--resume: there is no run in %s, so one begins there (a run that was started in another folder goes on "
            "with: python -m openpi_train resume RUN, its directory)",
            path,
        )


def _of_close_name(path: pathlib.Path) -> pathlib.Path | None:
    """A run beside the path whose name is nearly its own, and no other number of the same name (`seed_2`)."""
    without_numbers = re.sub(r"\d+", "", path.name)
    others = {one.name: one for one in _folders_in(path.parent) if re.sub(r"\d+", "", one.name) != without_numbers}
    close = difflib.get_close_matches(path.name, others, n=3, cutoff=_CLOSE_NAME)
    return next((others[name] for name in close if _is_there(others[name] / "experiment.json")), None)


def _folders_in(folder: pathlib.Path) -> list[pathlib.Path]:
    """The first of its folders by name; none if it cannot be read."""
    try:
        return sorted(one for one in folder.iterdir() if one.is_dir())[:_MOST_FOLDERS]
    except OSError:
        return []


def _is_there(file: pathlib.Path) -> bool:
    try:
        return file.is_file()
    except OSError:  # of somebody else's folder
        return False


def _inspect(given: Experiment) -> tuple[bool, dict]:
    """Whether the run exists, and what differs from it; writes nothing."""
    _check_flags(given)
    path = given.run_dir
    there = _nearest_folder(path)
    if not there.is_dir():
        raise UsageError(f"{there} is a file, and the run's folder would be {path}: give another --checkpoint-base-dir")
    is_run = (path / "experiment.json").is_file()
    saved = os.environ.get(SAVED_STEP_VARIABLE, "")
    if given.resume and not is_run and saved.isdecimal() and int(saved):
        why = f"step {int(saved)} was saved here before this restart, and there is no run: is its file system away?"
        raise OSError(errno.ESTALE, why, str(path))  # which is waited for
    # Log files may be opened before the run is, and a start that ended early leaves its lock and its generation.
    empty = {"logs", run_lock.NAME, fencing.NAME}
    if path.exists() and not is_run and (not path.is_dir() or {child.name for child in path.iterdir()} - empty):
        what = f". {found}" if (found := foreign(path)) else ""
        raise UsageError(f"{path} exists and is not a run (no experiment.json in it): choose another --exp-name{what}")
    if is_run and not given.resume and not given.overwrite and _has_trained(path):
        raise UsageError(
            f"{path} holds a run already: --resume continues it, --overwrite moves it aside, "
            "another --exp-name leaves it alone"
        )
    resume_point(given)
    return is_run, _check_same_run(given) if is_run and given.resume else {}


def _has_trained(run: pathlib.Path) -> bool:
    """Whether a step of the run is recorded or saved, also one that is damaged or was replaced."""
    metrics = run / "metrics.jsonl"
    return any(one.name[0].isdecimal() for one in run.iterdir()) or (metrics.exists() and metrics.stat().st_size > 0)


def _check_flags(given: Experiment) -> None:
    if given.resume and given.overwrite:
        raise UsageError("--resume and --overwrite exclude each other: continue the run, or move it aside?")
    for flag, name in (("experiment name", given.name), ("--exp-name", given.exp_name)):
        if not name or name.startswith((".", "-")) or "/" in name or os.sep in name or not name.isprintable():
            raise UsageError(
                f"{flag} {name!r} names a directory: it may not be empty, start with a dot or a dash, or contain a "
                "path separator or what cannot be printed"
            )
        if len(os.fsencode(name)) > _MAX_NAME_BYTES:
            raise UsageError(f"{flag} {name[:40]!r}... is longer than {_MAX_NAME_BYTES} bytes: choose a shorter one")


def _check_same_run(given: Experiment) -> dict[str, tuple[Any, Any]]:
    """The differences from the saved run. Raises UsageError if they make it a different run."""
    path = given.run_dir
    changes = _changes(given)
    refused = [name for name, values in changes.items() if resume_verdict(given, name, *values) == "refuse"]
    if refused and _has_trained(path):
        listing = "\n".join(
            f"  {name}: the run has {changes[name][0]!r}, given {changes[name][1]!r}" for name in refused
        )
        raise UsageError(
            f"--resume of {path} with another model or optimizer:\n{listing}\n"
            f"  Give the run's own values (`resume {path}` has them), or train the new ones under another --exp-name."
        )
    return changes


def _changes(given: Experiment) -> dict[str, tuple[Any, Any]]:
    """Every field of the saved run that differs in `given`."""
    try:
        recorded = recorded_json(given.run_dir) or {}
    except CheckpointError as error:
        raise UsageError(str(error)) from error
    found = changed_fields(recorded, as_json(given))
    return {name: values for name, values in found.items() if resume_verdict(given, name, *values) != "retired"}


def _without_secrets(arguments: list[str]) -> list[str]:
    """The command line with values replaced that are secrets by themselves, or by the name of their flag."""
    shown, hide = [], False
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        # Also NAME=VALUE of a variable.
        secret = bool(_SECRET.search(flag)) and (flag.startswith("-") or (flag.isupper() and bool(equals)))
        secret |= bool(equals) and bool(_SECRET_VALUE.search(value))
        if (hide and not argument.startswith("-")) or (not equals and _SECRET_VALUE.search(argument)):
            shown.append("<hidden>")
        elif secret and equals:
            shown.append(f"{flag}=<hidden>")
        else:
            shown.append(argument)
        hide = secret and not equals
    return shown


def _git_commit() -> dict[str, Any] | None:
    """The commit of this checkout and whether files differ from it; None outside a checkout."""
    here = pathlib.Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "modified": bool(git("status", "--porcelain", "--", "."))}
    except (OSError, subprocess.SubprocessError):
        return None
