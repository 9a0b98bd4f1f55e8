"""Where the threads of this process are: for messages about one that is slow or stuck. Read next: `watchdog.py`."""

import contextlib
import faulthandler
import os
import re
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_PACKAGE = Path(__file__).resolve().parents[1]
_DATA = _PACKAGE / "data"
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+) ")
_FUNCTION = re.compile(r'  File "(.*)", line (\d+) in (.*)')


class Function(NamedTuple):
    """A function that has not returned."""

    name: str
    file: str
    line: int

    def is_in(self, folder: Path) -> bool:
        return self.file.startswith(f"{folder}{os.sep}")


def stacks() -> Mapping[int, Sequence[Function]]:
    """The functions that each thread is in, innermost first, by the thread's `ident`.

    Of more than 100 threads the newest and the main one; none where no file can be opened. faulthandler walks all
    stacks before any thread goes on. Python code that walks the frames of a running thread may be led astray: an
    `f_back` was once a dtype of numpy (CPython 3.11, while Orbax wrote). So only the main thread, which seldom runs
    here, is walked so where faulthandler has not come to it.
    """
    found: dict[int, list[Function]] = {}
    functions: list[Function] = []
    try:
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in lines:
        if thread := _THREAD.match(line):
            functions = found.setdefault(int(thread[1], 16), [])
        elif function := _FUNCTION.fullmatch(line):
            functions.append(Function(function[3], function[1], int(function[2])))
    main = threading.main_thread().ident or 0
    if found and main not in found:
        with contextlib.suppress(Exception):
            frames = traceback.walk_stack(sys._current_frames()[main])
            found[main] = [Function(frame.f_code.co_name, frame.f_code.co_filename, line) for frame, line in frames]
    return found


def where() -> str:
    """Where the main thread is, and where a thread is that reads data, for which the main thread may wait."""
    everyone, main = stacks(), threading.main_thread().ident
    places = [_place(functions, _PACKAGE) for thread, functions in everyone.items() if thread == main]
    readers = [functions for thread, functions in everyone.items() if thread != main]
    reading = [functions for functions in readers if any(function.is_in(_DATA) for function in functions)]
    places += [f"a reader in {_place(functions, _DATA)}" for functions in reading[:1]]
    return f"in {'; '.join(places)}" if places else ""


def _place(functions: Sequence[Function], folder: Path) -> str:
    """The innermost function of a thread, and the innermost in this folder."""
    shown = dict.fromkeys([*functions[:1], *[function for function in functions if function.is_in(folder)][:1]])
    return ", within ".join(f"{name} ({Path(file).name}:{line})" for name, file, line in shown)
