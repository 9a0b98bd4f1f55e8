"""The output directory of a command: hidden beside the target, and renamed to it when it is complete.

Read next: `convert_checkpoint.py`, `sample_data.py`.
"""

import contextlib
import errno
import logging
import os
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from openpi_train.data.core.files import set_aside
from openpi_train.runtime.exits import CheckpointError, RunError, UsageError

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def drafted(target: Path, needed: int, overwrite: bool, kind: type[RunError] = CheckpointError) -> Iterator[Path]:
    """Yield a path beside `target` for `needed` bytes; renamed to `target` at the end, removed on failure.

    Remains of killed processes of this host are removed first. Raises UsageError if `target`
    exists and may not be moved aside, `kind` if it cannot be written.
    """
    check_draft(target, needed, overwrite, kind)
    made = [folder for folder in target.parents if not folder.exists()]
    draft = target.with_name(f".{target.name}.partial-{socket.gethostname()}-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target)
        with told_as(draft, str(target)):
            yield draft
        if target.exists():
            logger.info("--overwrite: what was in %s now lies in %s", target, set_aside(target, "replaced"))
        draft.rename(target)
    except Exception as error:  # tensorstore and safetensors have many kinds
        if isinstance(error, kind | UsageError):
            raise
        full = (isinstance(error, OSError) and error.errno == errno.ENOSPC) or "No space left" in str(error)
        what = "the disk is full; free some space" if full else f"{type(error).__name__}: {error}"
        raise kind(f"{target} could not be written: {what}. Nothing was left there") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        for folder in made if not target.exists() else []:
            with contextlib.suppress(OSError):  # another process has put something there
                folder.rmdir()


@contextlib.contextmanager
def told_as(inner: Path, own: str) -> Iterator[None]:
    """Name the user's `own` place where a log line or an error for the user has `inner`, a path of ours."""

    def renamed(record: logging.LogRecord) -> bool:
        said = record.getMessage()
        if str(inner) in said:
            record.msg, record.args = said.replace(str(inner), own), ()
        return True

    handlers = list(logging.getLogger().handlers)
    for handler in handlers:
        handler.addFilter(renamed)
    try:
        yield
    except RunError as error:
        raise type(error)(str(error).replace(str(inner), own)) from error
    finally:
        for handler in handlers:
            handler.removeFilter(renamed)


def check_draft(target: Path, needed: int, overwrite: bool, kind: type[RunError] = CheckpointError) -> None:
    """Raise UsageError and `kind` as `drafted` does before it writes."""
    if target.exists() and not overwrite:
        raise UsageError(f"{target} exists; give another directory, or --overwrite, which moves it aside")
    if target.is_symlink() and not target.exists():
        raise UsageError(f"{target} is a link to {target.readlink()}, which is not there; name the directory itself")
    _check_room(target, needed, kind)


def check_target(target: Path, source: str) -> None:
    """Raise UsageError if the target is an address or a file, not a folder, or is inside the source or contains it."""
    if re.match(r"[a-z]\w+:/", str(target)):
        raise UsageError(
            f"{target}: a result is written to a directory, or pushed to hub:USER/NAME; write it to a disk and copy it "
            "to the bucket (gcloud storage cp -r, aws s3 cp --recursive)"
        )
    if target.suffix == ".npz":
        raise UsageError(
            f"{target}: a result is a folder, in which --to big_vision writes paligemma.npz; give the folder's name"
        )
    there, here = target.expanduser().resolve(), Path(source).expanduser().resolve()
    if here.exists() and (here in (there, *there.parents) or there in here.parents):
        raise UsageError(f"{target} lies in {source}, or around it, or is the same; give a directory beside it")


def _check_room(target: Path, needed: int, kind: type[RunError]) -> None:
    """Raise `kind` if the disk has no space for `needed` bytes."""
    folder = next(path for path in target.parents if path.exists())
    if not folder.is_dir():
        raise kind(f"{target} cannot be made: {folder} is a file; choose another target")
    if not os.access(folder, os.W_OK):
        raise kind(f"{folder} cannot be written to; give yourself the right, or choose another target")
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise kind(f"not enough disk space in {folder}: {needed / 1e6:.1f} MB are needed, {free / 1e6:.1f} MB are free")


def _remove_leftovers(target: Path) -> None:
    """Remove the drafts of ended processes of this host; log drafts whose process is unknown."""
    ours = f".{target.name}.partial-{socket.gethostname()}-"
    for left in target.parent.glob(f".{target.name}.partial-*"):
        process = left.name.removeprefix(ours)
        if left.name.startswith(ours) and process.isdecimal() and not _runs(int(process)):
            logger.info("%s was left by a command that was cut off, and is removed", left)
            shutil.rmtree(left)
        else:
            logger.warning("%s belongs to another command; if none runs any more, remove it", left)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
