"""Ends a process with all programs that it has started, also those in sessions of their own or without their parent.

Must not import jax: processes of rewards import this module. Read next: `reward_process.py`.
"""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

# Linux, `include/uapi/linux/prctl.h`.
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36
# Rounds in which programs may start others while they are killed. Each round kills all that it finds.
_MOST_ROUNDS = 100


def adopt_orphans() -> None:
    """Become the parent of all programs below this process whose own parent ends. Linux alone knows that."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def end_with_parent() -> None:
    """Arrange to be killed when the thread that started this process ends. Linux alone knows that."""
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)


def end_group(leader: int) -> None:
    """Kill a process that leads a session, the group that it leads, and all programs below it.

    The process must not have been waited for: only so long is its number not another's. Where it has called
    `adopt_orphans`, programs below it include those that outlived their parent.
    """
    if leader != os.getpid():  # else it would see its programs end first, and go on with what it takes for their result
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(leader, signal.SIGSTOP)
    end_descendants(leader)
    # Last, as it may be this process. It may not have come to lead a group yet.
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(leader, signal.SIGKILL)


def end_descendants(process: int) -> None:
    """Kill all programs below a process; nothing where the system has no /proc."""
    for _ in range(_MOST_ROUNDS):
        found = _descendants(process)
        if not found:
            return
        for one in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(one, signal.SIGKILL)


def _descendants(process: int) -> list[int]:
    """The processes that it has started, and those that these have, without those that have ended: parents first."""
    children: dict[int, list[int]] = {}
    ended: set[int] = set()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
            # The name, in brackets, may have any characters; the state and the parent follow it.
            state, parent = entry.read_text(errors="replace").rpartition(")")[2].split()[:2]
            children.setdefault(int(parent), []).append(int(entry.parent.name))
            if state in "ZX":
                ended.add(int(entry.parent.name))
    found, waiting = [], [process]
    while waiting:
        below = children.pop(waiting.pop(0), [])
        waiting += below
        found += [one for one in below if one not in ended]
    return found


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
