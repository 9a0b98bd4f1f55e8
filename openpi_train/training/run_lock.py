"""Two starts of one run are kept apart by a lock that process 0 holds for its life. Read next: `rundir.py`.

The lock is the kernel's (`flock`): it goes when its holder ends, however that is, so that none is ever stale.
"""

import contextlib
import fcntl
import logging
import os
import pathlib
import platform
import time

from openpi_train.runtime.exits import UsageError
from openpi_train.runtime.waiting import Wait

logger = logging.getLogger(__name__)

NAME = ".lock"
LIMIT_S = 120.0  # NFS keeps the lock of a host that died for its lease, 90 s
_POLL_S = 0.2
_held: dict[pathlib.Path, int] = {}  # open files, by path: closing one frees its lock


def hold(directory: pathlib.Path) -> None:
    """Make the directory and lock it for as long as this process lives; what it holds already stays as it is.

    Where the file system has no locks there is a warning and no lock. Raises UsageError where another process still
    has the directory after LIMIT_S, OSError where it cannot be made.
    """
    path, wait = directory / NAME, Wait(LIMIT_S)
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            if _is_mine(path) or _take(path):
                return
        except FileNotFoundError:
            pass  # its holder has moved the directory aside just now (--overwrite)
        except OSError as error:
            logger.warning(
                "%s cannot be locked (%s): nothing will stop a second start of this run from writing into it, too",
                *(path, error),
            )
            return
        if wait.is_over():
            raise UsageError(
                f"{directory} is in use: {_holder(path)} has it, still after {LIMIT_S:g} s. One run is trained by one "
                "launch at a time: end that one, or choose another --exp-name"
            )
        wait.report(lambda: f"{_holder(path)} has the run in {directory}: waiting for it to be free")
        time.sleep(_POLL_S)


def _is_mine(path: pathlib.Path) -> bool:
    """Whether this process holds the lock of the file that is there now."""
    return path in _held and path.exists() and os.path.samestat(os.fstat(_held[path]), path.stat())


def _take(path: pathlib.Path) -> bool:
    """Take the lock and say in the file who has it; False while another process does."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_there = os.path.samestat(os.fstat(file), path.stat())  # not moved aside between the two lines above
    except OSError as error:
        os.close(file)
        if isinstance(error, BlockingIOError):
            return False
        raise
    if not is_there:
        os.close(file)
        return False
    with contextlib.suppress(OSError):  # a full disk: the lock holds, only its words are missing
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} on {platform.node()} (since {time.strftime('%F %T%z')})".encode())
    if path in _held:
        os.close(_held[path])
    _held[path] = file
    return True


def _holder(path: pathlib.Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8") or "another process"
    return "another process"
