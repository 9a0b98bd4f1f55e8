"""Faults from within a process of a run: Python imports this where the folder is on PYTHONPATH.

A thread waits for `$DRILL_FAULTS/rank_<RANK>.json`, which names a function of openpi_train (a window) and a harm, and
does the harm while a call of the function is under way; `fired_<RANK>.json` then says when and where.
Read next: `../windows.py`, which writes the files.
"""

import ctypes
import errno
import itertools
import json
import os
import pathlib
import platform
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

_FOLDER = pathlib.Path(os.environ.get("DRILL_FAULTS", ""))
_RANK = os.environ.get("RANK") or os.environ.get("SLURM_PROCID", "")
_TOKEN = os.environ.get("OPENPI_TRAIN_JOB_TOKEN", "")
_POLL_S = 0.005
_HANG_S = 3600.0
_CHUNK_BYTES = 32 << 20


def _watch() -> None:
    """Arm what the file says, unless it is meant for the process that comes after this one."""
    place, armed = _FOLDER / f"rank_{_RANK}.json", None
    while True:
        try:
            fault = json.loads(place.read_text())
        except (FileNotFoundError, ValueError):
            fault = None
        if fault is not None and fault["not_token"] != _TOKEN and fault["number"] != armed and _arm(fault):
            armed = fault["number"]
        time.sleep(_POLL_S)


def _arm(fault: dict[str, Any]) -> bool:
    """Have a call of the function do the harm; False: it is not imported yet."""
    place: Any = sys.modules.get(f"openpi_train.{fault['module']}")
    *owner, name = fault["function"].split(".")
    for part in owner:
        place = getattr(place, part, None)
    function = getattr(place, name, None)
    if function is None:
        return False
    harm = _HARMS[fault["harm"]](fault["value"])
    in_place, times, calls = fault["harm"] in _IN_PLACE, fault["times"], itertools.count()

    def harmed(*arguments, **named):
        number = next(calls)
        if number >= times:
            return function(*arguments, **named)
        if number == 0 and not in_place:
            return _during(function, arguments, named, harm, fault["after_s"])
        if in_place:
            if number == 0:
                _tell_fired()
            harm()
        return function(*arguments, **named)

    setattr(place, name, harmed)
    return True


def _during(function, arguments, named, harm: Callable[[], object], after_s: float) -> Any:
    """Call the function; the harm comes after `after_s`, or when the function is about to return."""
    ending = threading.Event()

    def strike() -> None:
        ending.wait(after_s)
        _tell_fired()
        harm()

    thread = threading.Thread(target=strike, name="fault", daemon=True)
    thread.start()
    try:
        return function(*arguments, **named)
    finally:
        ending.set()
        thread.join()


def _tell_fired() -> None:
    (_FOLDER / f"rank_{_RANK}.json").unlink(missing_ok=True)
    if not _FOLDER.is_dir():
        return
    draft = _FOLDER / f"fired_{_RANK}.draft"
    draft.write_text(json.dumps({"host": platform.node(), "at": time.monotonic(), "token": _TOKEN}))
    draft.replace(_FOLDER / f"fired_{_RANK}.json")


def _signal(number: int) -> Callable[[], object]:
    return lambda: os.kill(os.getpid(), number)


def _abort(value: object) -> Callable[[], object]:
    """End as a failed check in C++ does."""
    del value
    return lambda: ctypes.CDLL(None).abort()


def _hang(value: object) -> Callable[[], object]:
    del value
    return lambda: time.sleep(_HANG_S)


def _hold(value: object) -> Callable[[], object]:
    """Stay in the window until the drill has done its part: it deletes the file."""
    del value
    held = _FOLDER / f"fired_{_RANK}.json"

    def wait() -> None:
        while held.exists():
            time.sleep(_POLL_S)

    return wait


def _fill_memory(value: object) -> Callable[[], object]:
    del value

    def fill() -> None:
        kept = []
        while True:
            kept.append(b"\1" * _CHUNK_BYTES)

    return fill


def _leave_a_child(number: int) -> Callable[[], object]:
    """Die, and leave a process that nobody ends, with all open files: locks and ports stay taken."""

    def die() -> None:
        libc = ctypes.PyDLL(None)  # Python's and jax's own preparations for a fork would be in the way
        if libc.fork() == 0:
            libc.setsid()
            while True:
                libc.pause()
        os.kill(os.getpid(), number)

    return die


def _raise_in_jax(text: str) -> Callable[[], object]:
    def fail() -> None:
        import jax

        raise jax.errors.JaxRuntimeError(text)

    return fail


def _raise_of_system(name: str) -> Callable[[], object]:
    def fail() -> None:
        number = getattr(errno, name)
        raise OSError(number, os.strerror(number))

    return fail


def _lose_devices(value: object) -> Callable[[], object]:
    del value

    def lose() -> None:
        import jax

        jax.local_device_count = lambda *_, **__: 0

    return lose


_HARMS: dict[str, Callable[[Any], Callable[[], object]]] = {
    "signal": _signal,
    "abort": _abort,
    "hang": _hang,
    "hold": _hold,
    "memory": _fill_memory,
    "child": _leave_a_child,
    "jax": _raise_in_jax,
    "system": _raise_of_system,
    "devices": _lose_devices,
}
# By the calling thread, before the work.
_IN_PLACE = ("hang", "jax", "system", "devices")

if _FOLDER.name and _RANK and sys.orig_argv[1:3] == ["-m", "openpi_train"]:  # not in its own child processes
    threading.Thread(target=_watch, name="faults", daemon=True).start()
