"""Where this process is: for messages about one that is slow or stuck. Read next: `watchdog.py`.

Only the main thread and those that read data are looked at. The frames of others may not be walked while they run:
where an event loop or a thread of C++ came or went in between, CPython 3.11 crashed, or `f_back` was an object of
another kind (while Orbax and tensorstore wrote). faulthandler, which walks all in C, met threads that C++ was making.
"""

import os
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType

_PACKAGE = Path(__file__).resolve().parents[1]
_DATA = _PACKAGE / "data"
# What the names of threads that read data begin with: the feed's own (`data/core/feed.py`), and Grain's.
_READERS = ("feed", "grain")


def where() -> str:
    """Where the main thread is, and where a thread is that reads data, for which the main thread may wait."""
    frames, main = sys._current_frames(), threading.main_thread()
    everyone = reversed(threading.enumerate())  # the newest first: the feed's own waits for Grain's
    readers = [one.ident for one in everyone if one is not main and one.name.startswith(_READERS)]
    reading = [_place(frames.get(thread or 0), _DATA) for thread in readers]
    places = [_place(frames.get(main.ident or 0), _PACKAGE)[0]]
    return "in " + "; ".join([*places, *[f"a reader in {place}" for place, reads in reading if reads][:1]])


def _place(frame: FrameType | None, folder: Path) -> tuple[str, bool]:
    """The innermost function of a thread, and the innermost in this folder; and whether there is one."""
    frames = [(each.f_code.co_name, each.f_code.co_filename, line) for each, line in traceback.walk_stack(frame)]
    ours = [place for place in frames if place[1].startswith(f"{folder}{os.sep}")]
    shown = dict.fromkeys([*frames[:1], *ours[:1]])
    return ", within ".join(f"{name} ({Path(file).name}:{line})" for name, file, line in shown), bool(ours)
