"""Where this process is: for messages about one that is slow or stuck. Read next: `watchdog.py`.

Only the main thread and those that read data are looked at. Walking the frames of a thread that may go on in between
has ended or crashed processes (CPython 3.11, on busy machines, most often while Orbax and tensorstore wrote): `f_back`
led to an object of another kind. faulthandler, which walks all threads, met some that C++ was just making.
"""

import gc
import os
import sys
import threading
from collections.abc import Sequence
from itertools import accumulate, chain, islice, repeat
from operator import itemgetter
from pathlib import Path
from types import FrameType

_PACKAGE = Path(__file__).resolve().parents[1]
_DATA = _PACKAGE / "data"
# What the names of threads that read data begin with: the feed's own (`data/core/feed.py`), and Grain's.
_READERS = ("feed", "grain")


def where() -> str:
    """Where the main thread is, and where a thread is that reads data, for which the main thread may wait."""
    everyone = reversed(threading.enumerate())  # the newest first: the feed's own waits for Grain's
    main = threading.main_thread()
    readers = [one for one in everyone if one is not main and one.name.startswith(_READERS)]
    reading = [_place(_frames(reader), _DATA) for reader in readers]
    places = [_place(_frames(main), _PACKAGE)[0]]
    return "in " + "; ".join([*places, *[f"a reader in {place}" for place, reads in reading if reads][:1]])


def _frames(thread: threading.Thread) -> Sequence[FrameType]:
    """The frames of a thread, innermost first, as of one moment.

    C code alone takes them, so that no other thread goes on before all are held.
    """
    frames: list[FrameType | None] = []
    innermost = islice(map(itemgetter(thread.ident), iter(sys._current_frames, None)), 1)
    collects = gc.isenabled()
    gc.disable()  # what is collected may have methods in Python
    try:
        frames.extend(accumulate(chain(innermost, repeat("f_back")), getattr))
    except (AttributeError, KeyError):
        pass  # after the outermost frame, which has None behind it; or the thread has ended
    finally:
        if collects:
            gc.enable()
    return [frame for frame in frames if isinstance(frame, FrameType)]


def _place(stack: Sequence[FrameType], folder: Path) -> tuple[str, bool]:
    """The innermost function of a thread, and the innermost in this folder; and whether there is one."""
    frames = [(frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno) for frame in stack]
    ours = [place for place in frames if place[1].startswith(f"{folder}{os.sep}")]
    shown = dict.fromkeys([*frames[:1], *ours[:1]])
    return ", within ".join(f"{name} ({Path(file).name}:{line})" for name, file, line in shown), bool(ours)
