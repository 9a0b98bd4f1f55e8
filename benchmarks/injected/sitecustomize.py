"""Faults from within a process of a run: Python imports this where the folder is on PYTHONPATH.

A thread waits for `$DRILL_FAULTS/rank_<RANK>` and does once what is in there: a kind and its text, as JSON. A fault
"at the restart" waits for the next process of that rank. Read next: `../faults.py`, which writes the files.
"""

import errno
import json
import os
import pathlib
import sys
import threading
import time

_FOLDER = os.environ.get("DRILL_FAULTS", "")
_POLL_S = 0.02
_HANG_S = 3600.0


def _watch(place: pathlib.Path) -> None:
    """Do what the file says, and delete it."""
    while True:
        try:
            fault = json.loads(place.read_text())
            if fault.get("not_pid") == os.getpid():  # for the process that comes after this one
                raise FileNotFoundError
        except (FileNotFoundError, ValueError):
            time.sleep(_POLL_S)
            continue
        if _KINDS[fault["kind"]](fault.get("text", "")):
            place.unlink()
        time.sleep(_POLL_S)


def _module(name: str):
    return sys.modules.get(f"openpi_train.{name}")


def _next_step(text: str) -> bool:
    """The next call of the compiled step raises the runtime's own error, or hangs without a text."""
    program = _module("training.program")
    if program is None or not hasattr(program, "Programs"):
        return False
    import jax

    call = program.Programs.__call__

    def fail(self, *arguments):
        program.Programs.__call__ = call
        if not text:
            time.sleep(_HANG_S)
        raise jax.errors.JaxRuntimeError(text)

    program.Programs.__call__ = fail
    return True


def _next_save(text: str) -> bool:
    """Writing the next checkpoint fails with the error of this name, or hangs without one."""
    copy_out = _module("training.checkpoints.copy_out")
    if copy_out is None or not hasattr(copy_out, "ArrayWriter"):
        return False
    write = copy_out.ArrayWriter.write

    def fail(self, *arguments):
        copy_out.ArrayWriter.write = write
        if not text:
            time.sleep(_HANG_S)
        raise _error(text)

    copy_out.ArrayWriter.write = fail
    return True


def _reads(text: str) -> bool:
    """The next two times that a checkpoint is read through fail, as during a file server's failover."""
    store = _module("training.checkpoints.checkpoint_store")
    if store is None or not hasattr(store, "find_damage"):
        return False
    find, left = store.find_damage, [2]

    def fail(*arguments, **named):
        if left[0]:
            left[0] -= 1
            raise _error(text)
        return find(*arguments, **named)

    vars(store)["find_damage"] = fail
    return True


def _deletions(text: str) -> bool:
    """Old checkpoints cannot be deleted by this process any more."""
    dirs = _module("training.checkpoints.step_dirs")
    if dirs is None or not hasattr(dirs, "_remove"):
        return False

    def fail(directory, attempts=5):
        raise _error(text)

    vars(dirs)["_remove"] = fail
    return True


def _error(name: str) -> OSError:
    number = getattr(errno, name)
    return OSError(number, os.strerror(number))


_KINDS = {"step": _next_step, "save": _next_save, "read": _reads, "delete": _deletions}

if _FOLDER and "RANK" in os.environ:
    _place = pathlib.Path(_FOLDER) / f"rank_{os.environ['RANK']}"
    threading.Thread(target=_watch, args=(_place,), name="faults", daemon=True).start()
