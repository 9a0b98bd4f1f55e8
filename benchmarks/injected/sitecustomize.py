"""Faults from within a process of a run: Python imports this where the folder is on PYTHONPATH.

A thread waits for `$DRILL_FAULTS/rank_<RANK>` and does once what is in there: a kind and its text, as JSON. A fault
"at the restart" waits for the next process of that rank. Read next: `../faults.py`, which writes the files.
"""

import errno
import functools
import json
import math
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

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


def _replace(module: str, path: str, harm: Callable[[], object], times: float) -> bool:
    """Have the next `times` calls of a function of openpi_train do harm before the work; False: not imported yet."""
    place: Any = sys.modules.get(f"openpi_train.{module}")
    *owner, name = path.split(".")
    for part in owner:
        place = getattr(place, part, None)
    function = getattr(place, name, None)
    if function is None:
        return False
    left = [times]

    def harmed(*arguments, **named):
        if left[0] > 0:
            left[0] -= 1
            harm()
        return function(*arguments, **named)

    setattr(place, name, harmed)
    return True


def _next_step(text: str) -> bool:
    """The next call of the compiled step raises the runtime's own error, or hangs without a text."""
    return _replace("training.program", "Programs.__call__", lambda: _fail_in_jax(text) if text else _hang(), 1)


def _next_save(text: str) -> bool:
    """Writing the next checkpoint fails with the error of this name, or hangs without one."""
    harm = functools.partial(_fail, text) if text else _hang
    return _replace("training.checkpoints.copy_out", "ArrayWriter.write", harm, 1)


def _reads(text: str) -> bool:
    """The next two times that a checkpoint is read through fail, as during a file server's failover."""
    return _replace("training.checkpoints.checkpoint_store", "find_damage", functools.partial(_fail, text), 2)


def _deletions(text: str) -> bool:
    """Old checkpoints cannot be deleted by this process any more."""
    return _replace("training.checkpoints.step_dirs", "_remove", functools.partial(_fail, text), math.inf)


def _hang() -> None:
    time.sleep(_HANG_S)


def _fail_in_jax(text: str) -> None:
    import jax

    raise jax.errors.JaxRuntimeError(text)


def _fail(name: str) -> None:
    number = getattr(errno, name)
    raise OSError(number, os.strerror(number))


_KINDS = {"step": _next_step, "save": _next_save, "read": _reads, "delete": _deletions}

if _FOLDER and "RANK" in os.environ:
    _place = pathlib.Path(_FOLDER) / f"rank_{os.environ['RANK']}"
    threading.Thread(target=_watch, args=(_place,), name="faults", daemon=True).start()
