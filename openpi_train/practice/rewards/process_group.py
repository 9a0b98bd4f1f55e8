"""A process that leads a session of its own, and is ended with all programs that it has started.

Must not import jax: spawned processes import this module. Read next: `function_reward.py`.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import parent_process
from pathlib import Path


def lead_group() -> None:
    """Make this process the leader of a session, which ends, with what it has started, when its parent does."""
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def end_group(leader: int) -> None:
    """Kill a process that called `lead_group`, the group that it leads, and its programs in sessions of their own.

    The process must not have been waited for: only so long is its number not another's. Programs that outlived a parent
    in a session of their own are not found.
    """
    if leader != os.getpid():  # else it would see its programs end first, and go on with what it takes for their result
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(leader, signal.SIGSTOP)
    for process in list(_descendants(leader)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
    # Last, as it may be this process. It may not have come to lead a group yet.
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(leader, signal.SIGKILL)


def _descendants(process: int) -> Iterator[int]:
    """The processes that it has started, and those that these have; none where the system has no /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
            # The name, in brackets, may have any characters; the state and the parent follow it.
            parent = int(entry.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.parent.name))
    waiting = [process]
    while waiting:
        found = children.pop(waiting.pop(), [])
        waiting += found
        yield from found


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        end_group(os.getpid())
