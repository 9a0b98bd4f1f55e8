"""A real file system that is full, and has room again."""

import errno
import threading
from pathlib import Path

import pytest

from openpi_train.runtime.patient_file import PatientFile

LINE = "x" * 99 + "\n"


def test_what_a_full_disk_does_not_take_is_written_once_there_is_room(small_disk, fill_disk, caplog):
    caplog.set_level("INFO", logger="openpi_train")
    file = PatientFile(small_disk / "log")
    file.write("before\n")
    filler = fill_disk()
    for _ in range(100):  # the rest of the page is still free, so one of these is written in part
        assert file.write(LINE) == len(LINE)
    assert file.problem is not None and file.problem.errno == errno.ENOSPC
    (warned,) = caplog.records
    assert warned.levelname == "WARNING" and "log cannot be written (No space left on device)" in warned.message
    assert "Free some space before the next checkpoint" in warned.message
    filler.unlink()
    file.write("after\n")
    assert file.problem is None and "is complete again" in caplog.records[1].message
    assert file.close() == b""
    assert (small_disk / "log").read_text() == "before\n" + 100 * LINE + "after\n"


def test_a_file_that_cannot_be_opened_for_now_is_opened_later(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda *_, **__: raise_(OSError(errno.EIO, "Input/output error", "log")))
        file = PatientFile(tmp_path / "log")
        file.write("one\n")
        with pytest.raises(OSError, match=r"Input/output error: .*log"):
            file.require_written()
    file.write("two\n")
    assert file.close() == b"" and (tmp_path / "log").read_text() == "one\ntwo\n"
    with pytest.raises(FileNotFoundError):
        PatientFile(tmp_path / "no" / "log")


def raise_(error):
    raise error


def test_closing_tries_again_and_returns_what_is_left(small_disk, fill_disk):
    file = PatientFile(small_disk / "log")
    filler = fill_disk()
    file.write(100 * LINE)
    left = file.close()
    assert (small_disk / "log").read_bytes() + left == 100 * LINE.encode() and left
    file.write(100 * LINE)
    filler.unlink()
    assert file.close() == b"" and file.problem is None


def test_a_file_is_opened_again_by_a_write_after_its_end(tmp_path):
    file = PatientFile(tmp_path / "log")
    file.close()
    file.write("last words\n")
    file.close()
    assert (tmp_path / "log").read_text() == "last words\n"


def test_lines_of_several_threads_stay_whole(tmp_path):
    file = PatientFile(tmp_path / "log")
    threads = [threading.Thread(target=lambda: [file.write(LINE) for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file.close()
    assert (tmp_path / "log").read_text() == 800 * LINE


def test_a_file_that_cannot_be_opened_is_an_error_at_once(tmp_path):
    with pytest.raises(FileNotFoundError):
        PatientFile(tmp_path / "absent" / "log")
