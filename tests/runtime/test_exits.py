import collections
import errno
import os
import re
import socket
import subprocess
import sys

import pytest

from openpi_train.runtime import exits, phases

PRELUDE = """
import atexit, logging, sys, time
from openpi_train.runtime import exits, logs
logs.configure(0)
atexit.register(lambda: print("atexit ran"))
def main():
    {body}
exits.run_guarded(main)
"""


def end(body: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", PRELUDE.format(body=body)], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (exits.UsageError("x"), 2),
        (exits.DataError("x"), 3),
        (exits.CheckpointError("x"), 4),
        (exits.NumbersError("x"), 5),
        (exits.PeerLostError("x"), 70),
        (exits.StorageError("x"), 70),
        (exits.HardwareError("x"), 71),
        (exits.Preempted("x"), 75),
        # As jaxlib 0.10 writes them.
        (
            RuntimeError("INTERNAL: Could not synchronize: CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC"),
            71,
        ),
        (
            RuntimeError("INTERNAL: Failed to launch CUDA kernel: CUDA_ERROR_LAUNCH_FAILED: unspecified"),
            71,
        ),
        (RuntimeError("INTERNAL: no supported devices found: CUDA_ERROR_NO_DEVICE: no CUDA-capable device"), 71),
        (RuntimeError("RESOURCE_EXHAUSTED: CUDA_ERROR_OUT_OF_MEMORY: out of memory"), 1),
        (ValueError("UNKNOWN: Gloo all-reduce failed: [..] Connection reset by peer"), 70),
        (RuntimeError("UNAVAILABLE: Failed to send RPC to coordination service"), 70),
        (ValueError("12 is not a multiple of 8"), 1),
        # Of a file, whichever it is; the last two are not of files.
        (OSError(errno.EIO, "Input/output error"), 70),
        (OSError(errno.ESTALE, "Stale file handle", "x"), 70),
        (OSError(errno.ENOTCONN, "Transport endpoint is not connected", "x"), 70),
        (OSError(errno.EROFS, "Read-only file system", "x"), 70),
        (OSError(errno.ESHUTDOWN, "Cannot send after transport endpoint shutdown", "x"), 70),
        (OSError(errno.EUCLEAN, "Structure needs cleaning", "x"), 70),
        (ValueError("UNKNOWN: Error reading local file: Input/output error [os_error_code='5']"), 70),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), 70),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), 1),
        (OSError(errno.ETIMEDOUT, "Connection timed out"), 1),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_every_error_has_its_exit_code(error, code):
    assert exits.exit_code_of(error) == code


def test_a_device_without_memory_for_a_step_like_those_before_has_failed_and_no_program(monkeypatch):
    error = RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1073741824 bytes.")
    monkeypatch.setattr(phases, "_step_durations_s", collections.deque([0.1, 0.1]))
    assert exits.exit_code_of(error) == exits.BUG
    phases.step_done(3)
    assert exits.exit_code_of(error) == exits.HARDWARE


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        OSError(errno.EMFILE, "Too many open files", "x"),
        RuntimeError("can't start new thread"),
        PermissionError(errno.EACCES, "Permission denied", "x"),
        ValueError("Error writing local file: Permission denied [os_error_code='13']"),
    ],
)
def test_what_a_host_or_a_file_system_refuses_after_steps_is_no_bug_of_the_run(error, monkeypatch):
    monkeypatch.setattr(phases, "_step_durations_s", collections.deque([0.1, 0.1]))
    assert exits.exit_code_of(error) == exits.BUG
    phases.step_done(3)
    assert exits.exit_code_of(error) == exits.PEER_LOST


THREAD = "import threading; thread = threading.Thread(target={}); thread.start(); thread.join(); time.sleep(20)"


@pytest.mark.parametrize(
    "body",
    [
        "def fail():\n        raise MemoryError('of a thread')\n    " + THREAD.format("fail"),
        # What C++ calls, such as tensorstore's threads, can raise nothing.
        "class Told:\n        def __del__(self):\n            raise MemoryError('of a thread')\n    "
        + THREAD.format("lambda: Told() and None"),
    ],
)
def test_a_thread_that_an_exhausted_host_ends_is_waited_for_by_nobody(body):
    ended = end(f"exits.phases.has_taken_first_steps = lambda: True\n    {body}")
    assert ended.returncode == 70 and "MemoryError" in ended.stderr and "of a thread" in ended.stderr
    going_on = body.replace("time.sleep(20)", "sys.exit(3)")
    other = end(f"exits.phases.has_taken_first_steps = lambda: True\n    {going_on.replace('MemoryError', 'KeyError')}")
    assert other.returncode == 3 and "KeyError" in other.stderr
    before = end(going_on)  # a start, or a server
    assert before.returncode == 3 and "MemoryError" in before.stderr


def test_an_error_that_may_pass_is_no_error_of_the_users_file():
    for number, kind in ((errno.EIO, exits.StorageError), (errno.ENOSPC, exits.DataError)):
        with pytest.raises(kind, match=r"a\.json"):
            with exits.reported_as(exits.DataError):
                raise OSError(number, os.strerror(number), "a.json")


def told(*errors):
    """What is raised where checks raise these in turn."""
    together = exits.ErrorCollector()
    for error in errors:
        with together:
            raise error
    try:
        together.raise_all()
    except exits.RunError as raised:
        return raised
    return None


def test_errors_that_are_told_together_are_those_for_the_user():
    alone = exits.IndivisibleError("12")
    assert told(alone) is alone and told() is None
    both = told(alone, exits.DataError("no data"), exits.DataError("no data, and why"), KeyError("follows"))
    assert type(both) is exits.DataError and str(both) == "12\nno data, and why"
    longest_last = told(exits.UsageError("it does not fit\ndo this"), exits.CheckpointError("no weights"))
    # The command has to be changed in any case.
    assert (type(longest_last), str(longest_last)) == (exits.UsageError, "no weights\nit does not fit\ndo this")
    with pytest.raises(KeyError):
        told(KeyError("a mistake of ours"))
    with pytest.raises(KeyboardInterrupt):
        told(exits.UsageError("x"), KeyboardInterrupt())


def test_the_cause_of_an_error_decides():
    try:
        try:
            raise exits.DataError("torn")
        except exits.DataError as cause:
            raise RuntimeError("worker failed") from cause
    except RuntimeError as error:
        assert exits.exit_code_of(error) == 3


def test_a_user_error_shows_its_message_and_no_traceback():
    ended = end('raise exits.CheckpointError("no checkpoint in /x")')
    assert ended.returncode == 4
    assert "no checkpoint in /x" in ended.stderr and "Traceback" not in ended.stderr


def test_a_bug_shows_its_traceback_and_leaves_without_atexit():
    ended = end('print("before"); {}["missing"]')
    assert ended.returncode == 1
    assert "KeyError: 'missing'" in ended.stderr
    assert ended.stdout == "before\n"


GLOO = """ValueError('UNKNOWN: Gloo all-reduce failed: Connection reset by peer\\nand on, for pages')"""


def test_a_lost_peer_is_one_line_on_the_terminal_and_all_of_it_in_the_log_file(tmp_path):
    ended = end(f"import pathlib; logs.configure(0, pathlib.Path({str(tmp_path)!r})); raise {GLOO}")
    assert ended.returncode == 70
    line = "another process or the network to it was lost (UNKNOWN: Gloo all-reduce failed: Connection reset by peer)"
    assert ended.stderr.splitlines()[-1].endswith(line)
    assert "Traceback" not in ended.stderr and "for pages" not in ended.stderr
    log = (tmp_path / "logs" / "process_0.log").read_text()
    assert line in log and "Traceback" in log and "for pages" in log


def test_a_failed_file_system_is_one_line_on_the_terminal_that_names_the_file(tmp_path):
    body = f"import pathlib; logs.configure(0, pathlib.Path({str(tmp_path)!r}))"
    ended = end(f"{body}; raise OSError(5, 'Input/output error', '/runs/x/plan.json')")
    assert ended.returncode == 70 and "Traceback" not in ended.stderr
    assert re.search(r"\[Errno 5\] .*/runs/x/plan\.json.*start again", ended.stderr)


def test_a_lost_peer_shows_all_where_there_is_no_log_file_yet():
    ended = end(f"raise {GLOO}")
    assert ended.returncode == 70 and "Traceback" in ended.stderr and "for pages" in ended.stderr


def test_a_user_error_has_its_traceback_in_the_log_file(tmp_path):
    body = f'import pathlib; logs.configure(0, pathlib.Path({str(tmp_path)!r})); raise exits.DataError("torn")'
    ended = end(body)
    assert ended.returncode == 3 and "Traceback" not in ended.stderr
    assert "Traceback" in (tmp_path / "logs" / "process_0.log").read_text()


def test_a_good_run_leaves_in_order():
    ended = end("return None")
    assert (ended.returncode, ended.stdout) == (0, "atexit ran\n")
    assert end("sys.exit(0)").stdout == "atexit ran\n"


@pytest.mark.parametrize(("body", "code"), [("return 5", 5), ("sys.exit(2)", 2), ("sys.exit('why')", 1)])
def test_a_run_that_is_not_well_leaves_at_once(body, code):
    ended = end(body)
    assert (ended.returncode, ended.stdout) == (code, "")
    assert ("why" in ended.stderr) == (code == 1)
