"""File locks between processes. Read next: `waiting.py`.

The kernel owns the lock (`flock`) and releases it when its holder ends in any way, so it is never stale.
"""

import contextlib
import fcntl
import math
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path

from openpi_train.runtime.waiting import Wait

_POLL_S = 0.2


def take(path: Path, purpose: str, *, limit_s: float = math.inf) -> int:
    """Lock the file, creating it and its folder if needed; returns its descriptor, and closing it releases the lock.

    While another process holds it this waits, with a log line that names the holder and the `purpose`. Raises
    TimeoutError naming the holder after `limit_s`, OSError if the file cannot be created or the disk has no locks.
    """
    wait = Wait(limit_s)
    wait.reported = -math.inf  # the first line at once
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # its holder has moved or removed the folder just now
            file = _try(path)
            if file is not None:
                return file
        if wait.is_over():
            raise TimeoutError(f"{_holder(path)} has it, still after {limit_s:g} s")
        wait.report(lambda: f"{purpose}: waiting for {_holder(path)},")
        time.sleep(_POLL_S)


@contextlib.contextmanager
def held(path: Path, purpose: str) -> Iterator[None]:
    """Hold the file's lock in the block, waiting without limit. Raises OSError as `take`."""
    file = take(path, purpose)
    try:
        yield
    finally:
        os.close(file)


def is_held(path: Path) -> bool:
    """Whether another process, or another open file of this one, holds the file's lock; False where locks fail."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # freed at once: a start that meets it tries again
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(file)
    return False


def _try(path: Path) -> int | None:
    """Take the lock and write the holder to the file; None if another process holds it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_there = os.path.samestat(os.fstat(file), path.stat())  # not moved aside between the two lines above
    except OSError as error:
        os.close(file)
        if isinstance(error, BlockingIOError):
            return None
        raise
    if not is_there:
        os.close(file)
        return None
    with contextlib.suppress(OSError):  # a full disk: the lock holds, only its words are missing
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} on {platform.node()} (since {time.strftime('%F %T%z')})".encode())
    return file


def _holder(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8").strip() or "another process"
    return "another process"
