import contextlib
import re
import threading
from pathlib import Path

from openpi_train.runtime import stacks


@contextlib.contextmanager
def waiting(count=1):
    """So many threads that wait, in functions called `read`."""
    release, reading = threading.Event(), threading.Semaphore(0)

    def read():
        reading.release()
        release.wait(60)

    threads = [threading.Thread(target=read) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        for _ in threads:
            assert reading.acquire(timeout=60)
        yield threads
    finally:
        release.set()
        for thread in threads:
            thread.join()


def test_the_stack_of_each_thread_is_python_s_own():
    with waiting() as (thread,):
        found = stacks.stacks()
    names = [function.name for function in found[thread.ident]]
    assert names == ["wait", "wait", "read", "run", "_bootstrap_inner", "_bootstrap"]
    assert found[thread.ident][2].file == __file__
    here = [function.name for function in found[threading.main_thread().ident]]
    assert here[:2] == ["stacks", "test_the_stack_of_each_thread_is_python_s_own"]


def test_where_a_process_is_names_its_main_thread_and_one_that_reads_data(monkeypatch):
    assert re.fullmatch(r"in stacks \(stacks\.py:\d+\)", stacks.where())
    monkeypatch.setattr(stacks, "_DATA", Path(__file__).parent)
    with waiting():
        said = stacks.where()
    assert re.search(r"; a reader in wait \(threading\.py:\d+\), within read \(test_stacks\.py:\d+\)$", said)


def test_of_very_many_threads_some_are_told(monkeypatch):
    monkeypatch.setattr(stacks, "_DATA", Path(__file__).parent)
    with waiting(150):
        assert re.fullmatch(r"in stacks \(.*\); a reader in wait \(.*\), within read \(.*\)", stacks.where())


def test_where_no_file_can_be_opened_nothing_is_told(monkeypatch):
    def refuse(*_, **__):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(stacks.tempfile, "TemporaryFile", refuse)
    assert stacks.where() == ""
