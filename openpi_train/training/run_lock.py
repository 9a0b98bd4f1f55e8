"""Locks a run directory, so that a run is not started twice; process 0 holds the lock for its life. Read next:
`checkpoints/fencing.py`, which takes over where there are no locks, `rundir.py`."""

import logging
import os
import pathlib

from openpi_train.checkpoints import fencing
from openpi_train.runtime import locks
from openpi_train.runtime.exits import UsageError
from openpi_train.runtime.world import is_restart

logger = logging.getLogger(__name__)

NAME = ".lock"
LIMIT_S = 120.0  # NFS keeps the lock of a dead host for its lease, 90 s
_held: dict[pathlib.Path, int] = {}  # open files, by path: closing one frees its lock


def hold(directory: pathlib.Path) -> None:
    """Create the directory and lock it for the life of this process; locks that it already holds are kept.

    If the file system has no locks there is a warning and no lock; either way the run's generation is increased, which
    ends an older start at its next write. So it is where a launcher restarts a run and an earlier start of it still has
    the lock after LIMIT_S. Raises UsageError if any other process has, OSError if it cannot be created.
    """
    path = directory / NAME
    directory.mkdir(parents=True, exist_ok=True)
    if _is_mine(path):
        return
    try:
        file = locks.take(path, f"the run in {directory}", limit_s=LIMIT_S)
    except TimeoutError as error:
        if not is_restart(os.environ):
            raise UsageError(
                f"{directory} is in use: {error}. One run is trained by one launch at a time: end that one, or choose "
                "another --exp-name"
            ) from error
        # A process on a broken device cannot always be killed.
        logger.warning("an earlier start of this run has not ended (%s); it cannot change anything any more", error)
    except OSError as error:
        logger.warning(
            "%s cannot be locked (%s): nothing keeps a second start of this run waiting; it ends this one instead, at "
            "the next line of metrics or save",
            *(path, error),
        )
    else:
        if path in _held:
            os.close(_held[path])
        _held[path] = file
    fencing.claim(directory)


def _is_mine(path: pathlib.Path) -> bool:
    """Whether this process holds the lock of the file that exists now."""
    return path in _held and path.exists() and os.path.samestat(os.fstat(_held[path]), path.stat())
