import contextlib
import re
import sys
import threading
import traceback
from pathlib import Path

import pytest

from openpi_train.runtime import stacks


@contextlib.contextmanager
def waiting(name):
    """A thread of this name that waits, in a function called `read`."""
    release, reading = threading.Event(), threading.Event()

    def read():
        reading.set()
        release.wait(60)

    thread = threading.Thread(target=read, name=name)
    thread.start()
    try:
        assert reading.wait(60)
        yield thread
    finally:
        release.set()
        thread.join()


@pytest.mark.parametrize(("name", "is_told"), [("feed_0", True), ("asyncio_0", False)])
def test_where_a_process_is_names_its_main_thread_and_one_that_reads_data(monkeypatch, name, is_told):
    assert re.fullmatch(r"in \w+ \(stacks\.py:\d+\)", stacks.where())
    monkeypatch.setattr(stacks, "_DATA", Path(__file__).parent)
    with waiting(name):
        said = stacks.where()
    found = re.search(r"; a reader in wait \(threading\.py:\d+\), within read \(test_stacks\.py:\d+\)$", said)
    assert bool(found) == is_told


def test_the_frames_of_a_thread_are_all_of_them():
    with waiting("any") as thread:
        walked = [frame for frame, _ in traceback.walk_stack(sys._current_frames()[thread.ident])]
        assert stacks._frames(thread) == walked and len(walked) > 3
    assert stacks._frames(thread) == [], "it has ended"


def test_no_bytecode_runs_while_frames_are_taken():
    """Between two another thread might go on, and what `f_back` says would be wrong."""
    seen, main = [], threading.main_thread()
    sys.settrace(lambda frame, event, argument: seen.append(frame.f_code.co_name))
    try:
        stacks._frames(main)
    finally:
        sys.settrace(None)
    # Before they are taken, and after.
    assert seen[:2] == ["_frames", "ident"] and set(seen[2:]) <= {"<listcomp>"}
