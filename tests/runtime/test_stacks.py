import re
import threading
from pathlib import Path

import pytest

from openpi_train.runtime import stacks


@pytest.mark.parametrize(("name", "is_told"), [("feed_0", True), ("asyncio_0", False)])
def test_where_a_process_is_names_its_main_thread_and_one_that_reads_data(monkeypatch, name, is_told):
    assert re.fullmatch(r"in where \(stacks\.py:\d+\)", stacks.where())
    release, reading = threading.Event(), threading.Event()

    def read():
        reading.set()
        release.wait(60)

    monkeypatch.setattr(stacks, "_DATA", Path(__file__).parent)
    thread = threading.Thread(target=read, name=name)
    thread.start()
    try:
        assert reading.wait(60)
        said = stacks.where()
    finally:
        release.set()
        thread.join()
    found = re.search(r"; a reader in wait \(threading\.py:\d+\), within read \(test_stacks\.py:\d+\)$", said)
    assert bool(found) == is_told


def test_frames_of_other_threads_are_not_walked(monkeypatch):
    """CPython 3.11 may crash there (an event loop's, one of C++)."""
    walked = []
    monkeypatch.setattr(stacks.traceback, "walk_stack", lambda frame: walked.append(frame) or [])
    release = threading.Event()
    others = [threading.Thread(target=release.wait, args=(60,), name=name) for name in ("loop", "checkpoint_0")]
    for other in others:
        other.start()
    try:
        stacks.where()
    finally:
        release.set()
        for other in others:
            other.join()
    assert len(walked) == 1 and walked[0] is not None
