"""The generation of a run directory, which keeps an older start of the run from changing what a newer one owns.

Each start increases the number in `<run>/.generation`, a fencing token. Before every commit, deletion and cut the file
is read again: other contents than our own mean that a newer start has the run. Unlike a lock it holds where a file
system has no locks (`flock` fails on some mounts of Lustre and NFS) or has lost them, and when a process wakes up that
everybody believed dead. Process 0 claims, and asks for what all share. Where each process commits
and deletes on a disk of its own, it asks, too (`local_tier.py`). Read next: `training/run_lock.py`.
"""

import contextlib
import datetime
import os
import pathlib
import platform
import re
import secrets
import sys
import time

from openpi_train.data.core.files import write_text
from openpi_train.runtime.exits import StorageError, UsageError
from openpi_train.runtime.passing_errors import patiently

NAME = ".generation"
_claimed: dict[pathlib.Path, str] = {}  # what this process has written, by path


def claim(directory: pathlib.Path) -> None:
    """Make this process the owner of the directory: earlier ones end at their next `require_owned`.

    Raises UsageError if another start claims it at this very moment, OSError if it cannot be written.
    """
    path = _path(directory)
    before = re.match(r"generation (\d+)", _read(path) or "")
    # Two starts that claim at once have the same number: the word tells them apart, and the last to write has the run.
    number, word = int(before[1]) + 1 if before else 1, secrets.token_hex(8)
    since = time.strftime("%F %T%z")
    _claimed[path] = f"generation {number}, process {os.getpid()} on {platform.node()} (since {since}, {word})\n"
    write_text(path, _claimed[path])
    require_owned(directory)


def claimed(directory: pathlib.Path) -> str | None:
    """What this process has written into the directory's file, None if nothing: for `join`."""
    return _claimed.get(_path(directory))


def join(directory: pathlib.Path, claim: str | None) -> None:
    """Ask from now on whether the start of the run that has this claim, process 0's, still owns the directory."""
    if claim is not None:
        _claimed[_path(directory)] = claim


def require_owned(directory: pathlib.Path) -> None:
    """Return if no newer start has claimed the directory; at once if this process has never claimed it.

    Raises UsageError if one has, or the directory is gone; StorageError if the file cannot be read for minutes, or is
    that of an older start: another file system is there now.
    """
    if _path(directory) in _claimed:
        path = _path(directory)
        patiently(lambda: _compare(path, _read(path)), f"reading {path}")


def require_owned_if_readable(directory: pathlib.Path) -> None:
    """As `require_owned`, for lines that may be lost: what cannot be read now is not waited for."""
    path = _path(directory)
    if path in _claimed:
        try:
            found = _read(path)
        except OSError:
            return
        _compare(path, found)


def _compare(path: pathlib.Path, found: str | None) -> None:
    own = _claimed[path]
    if found is None:
        found = _put_back(path, own)
    if found is not None and not found.strip():  # a disk without space, or a crash, has emptied it
        write_text(path, own)
        found = own
    if found == own:
        return
    if found is None:
        reason = f"{path.parent} was moved or removed"
    elif _age(found) < _age(own):
        raise StorageError(
            f"{path.parent} is not the directory that this start ({own.strip()}) has opened: what wrote there last is "
            f"older ({found.strip()}). Its file system was away, or another one is mounted there; look at that, and "
            "start again with --resume"
        )
    else:
        reason = f"a newer start of the run owns {path.parent}: {found.strip()}"
    raise UsageError(
        f"{reason}. This older one ({own.strip()}) ends here and leaves everything there as it is: one run is trained "
        "by one launch at a time"
    )


def _age(claim: str) -> tuple[int, float]:
    """The number of a claim, and when it was made, to the minute: clocks of hosts differ."""
    number, since = re.match(r"generation (\d+)", claim), re.search(r"since (\S+ \S+?),", claim)
    made = 0.0
    if since is not None:
        with contextlib.suppress(ValueError):
            made = datetime.datetime.strptime(since[1], "%Y-%m-%d %H:%M:%S%z").timestamp() // 60
    return int(number[1]) if number else sys.maxsize, made


def _put_back(path: pathlib.Path, own: str) -> str | None:
    """Write the file again where somebody has deleted it alone; returns what is there then, None without a folder."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(own)
        return own
    except FileExistsError:
        return _read(path)
    except FileNotFoundError:
        return None


def _read(path: pathlib.Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None


def _path(directory: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(os.path.abspath(directory)) / NAME
