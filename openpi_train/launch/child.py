"""One started process: its output line by line, its end, signals to it. Read next: `processes.py`, watching many."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO

DRAIN_S = 5.0  # for the last lines of a process that has ended


class Started(ABC):
    """A handle that a launcher has for one or more started processes."""

    @abstractmethod
    def watch(self) -> None:
        """Start the threads that read the output and wait for the end; called when all processes are started."""

    @abstractmethod
    def send(self, signum: int) -> None:
        """Send a signal to the processes; SIGKILL also goes to all processes that they have started."""

    @abstractmethod
    def close(self) -> None:
        """Kill what an ended process has left running, and read its output to the end."""


class Child(Started):
    """A process on this machine. Its lines go to `on_line`, its exit code (128 + n for signal n) to `on_end`.

    With `with_input`, `write` writes to its stdin; otherwise it has none.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        on_line: Callable[[bytes, bool], None],
        on_end: Callable[[int], None],
        with_input: bool = False,
    ):
        self._on_line, self._on_end = on_line, on_end
        self._process = subprocess.Popen(
            argv,
            env={**os.environ, **env, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE if with_input else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches only the launcher, which forwards it
            preexec_fn=_die_with_launcher if sys.platform == "linux" else None,
        )
        self._input_lock = threading.RLock()
        self._ended = False
        self._readers = [
            threading.Thread(target=self._read, args=(self._process.stdout, False), daemon=True),
            threading.Thread(target=self._read, args=(self._process.stderr, True), daemon=True),
        ]
        self._waiter = threading.Thread(target=self._wait, daemon=True)

    def watch(self) -> None:
        for thread in (*self._readers, self._waiter):
            thread.start()

    def send(self, signum: int) -> None:
        with suppress(ProcessLookupError):
            if signum == signal.SIGKILL:
                os.killpg(self._process.pid, signum)
            elif not self._ended:
                self._process.send_signal(signum)

    def write(self, line: bytes) -> None:
        """Write a line to the process's stdin; ignored if the process has ended."""
        assert self._process.stdin is not None
        with self._input_lock, suppress(OSError, ValueError):
            os.write(self._process.stdin.fileno(), line)  # no buffer: a signal handler may write, too

    def close_input(self) -> None:
        """Close the process's stdin."""
        assert self._process.stdin is not None
        with self._input_lock, suppress(OSError):
            self._process.stdin.close()

    def close(self) -> None:
        self.send(signal.SIGKILL)
        if self._waiter.ident is not None:
            self._waiter.join(timeout=DRAIN_S)
            self.drain()

    def drain(self, timeout_s: float = DRAIN_S) -> None:
        """Wait until its output is read to the end; a process that it left running may keep it open."""
        for thread in self._readers:
            thread.join(timeout=timeout_s)

    def wait(self, timeout_s: float) -> None:
        """Wait until it has ended, at most `timeout_s`."""
        self._waiter.join(timeout=timeout_s)

    def _wait(self) -> None:
        code = self._process.wait()
        self._ended = True
        self._on_end(code if code >= 0 else 128 - code)

    def _read(self, stream: IO[bytes], is_error: bool) -> None:
        with stream:  # not left to the garbage collector: a launcher has many starts, and 1,024 files
            for line in stream:
                self._on_line(line, is_error)


def _die_with_launcher() -> None:
    """In the new process: arrange to be killed with the launcher, so that no orphaned run keeps a port."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
