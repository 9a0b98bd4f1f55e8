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
    """What a launcher has started for one or more processes."""

    @abstractmethod
    def watch(self) -> None:
        """Begin to read the output and to wait for the end, in threads; called when all are started."""

    @abstractmethod
    def send(self, signum: int) -> None:
        """Send a signal to the processes; SIGKILL goes to all that they have started, too."""

    @abstractmethod
    def close(self) -> None:
        """Clear away what an ended process has left running, and see its output to the end."""


class Child(Started):
    """A process on this machine. Its lines go to `on_line`, its exit code (128 + n for signal n) to `on_end`.

    With `with_input`, what is given to `write` is its stdin; else it has none.
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
            start_new_session=True,  # Ctrl-C comes to the launcher alone, which passes it on
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
        """Give the process a line on stdin; nobody may be there any more."""
        assert self._process.stdin is not None
        with self._input_lock, suppress(OSError, ValueError):
            os.write(self._process.stdin.fileno(), line)  # no buffer: a signal handler may write, too

    def close_input(self) -> None:
        """End the process's stdin."""
        assert self._process.stdin is not None
        with self._input_lock, suppress(OSError):
            self._process.stdin.close()

    def close(self) -> None:
        self.send(signal.SIGKILL)
        if self._waiter.ident is not None:
            self._waiter.join(timeout=DRAIN_S)
            self.drain()

    def drain(self, timeout_s: float = DRAIN_S) -> None:
        """Wait until its output is read to the end; a process that it left running may hold it open."""
        for thread in self._readers:
            thread.join(timeout=timeout_s)

    def wait(self, timeout_s: float) -> None:
        """Return when it has ended, or after `timeout_s`."""
        self._waiter.join(timeout=timeout_s)

    def _wait(self) -> None:
        code = self._process.wait()
        self._ended = True
        self._on_end(code if code >= 0 else 128 - code)

    def _read(self, stream: IO[bytes], is_error: bool) -> None:
        for line in stream:
            self._on_line(line, is_error)


def _die_with_launcher() -> None:
    """In the new process: be killed when the launcher is, so that no run is left behind with a port."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
