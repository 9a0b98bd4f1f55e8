"""Renders chat templates in a process of its own, which is ended where one takes too much time or memory.

A template comes with a published model. jinja's sandbox keeps it from files and programs, and not from loops without
end or texts without bound; neither can be stopped in a thread. Read next: `chat_template.py`.
"""

import atexit
import contextlib
import json
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection

from openpi_train.runtime.exits import DataError

# A conversation of a million tokens takes less than a second, and some times its text.
MOST_S = 30.0
MOST_BYTES = 4 << 30
_ADVICE = "correct it, or give another one"
_BOOT = (
    "import json, sys; told = json.loads(sys.argv.pop()); sys.path[:] = told['path']; "
    "from openpi_train.data.text.template_process import serve; serve(told['socket'], told['bytes'])"
)


class TemplateProcess:
    """The process, which is started at the first use and ends with this one. Threads take turns."""

    def __init__(self, *, most_s: float = MOST_S, most_bytes: int = MOST_BYTES):
        self._most_s, self._most_bytes = most_s, most_bytes
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._connection: Connection | None = None
        self._owner = 0

    def ask(self, *question: object) -> tuple[str, str]:
        """What `chat_template.answer` says to the question: its kind and text. Raises DataError beyond a limit."""
        with self._lock:
            if self._connection is None or self._owner != os.getpid():  # of a parent that has forked
                self._start()
            assert self._connection is not None
            try:
                self._connection.send_bytes(pickle.dumps((self._most_s, question)))
                kind, text = json.loads(self._connection.recv_bytes())
            except (EOFError, BrokenPipeError, ConnectionResetError):
                code = self.close()
                if code == -signal.SIGALRM:
                    raise DataError(f"{_told(question)} takes longer than {self._most_s:g} s; {_ADVICE}") from None
                raise DataError(
                    f"{_told(question)} has ended its process ({code}), as where no memory is left; {_ADVICE}"
                ) from None
            except BaseException:  # such as Ctrl-C: the answer is still to come
                self.close()
                raise
        if kind == "memory":
            most = f"{self._most_bytes / (1 << 30):g} GiB of memory"
            raise DataError(f"{_told(question)} takes more than {most}; {_ADVICE}")
        return kind, text

    def close(self) -> int | None:
        """End the process, and return its exit code."""
        process, connection, self._process, self._connection = self._process, self._connection, None, None
        if connection is not None:
            connection.close()
        return process.wait() if process is not None and self._owner == os.getpid() else None

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        told = {"path": sys.path, "socket": theirs.fileno(), "bytes": self._most_bytes}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(told)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._connection, self._owner = Connection(ours.detach()), os.getpid()


def _told(question: tuple[object, ...]) -> str:
    return f"the chat template {question[1]}"


def serve(connection_fd: int, most_bytes: int) -> None:
    """The process: answers until the other end is closed. A question that takes too long ends it (SIGALRM)."""
    from openpi_train.data.text.chat_template import answer  # which imports this module

    for signum in (signal.SIGTERM, signal.SIGINT):  # of a whole Slurm step
        signal.signal(signum, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = most_bytes if hard == resource.RLIM_INFINITY else min(most_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    connection = Connection(connection_fd)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            most_s, question = pickle.loads(connection.recv_bytes())
            signal.setitimer(signal.ITIMER_REAL, most_s)
            try:
                said = json.dumps(answer(*question))
            except MemoryError:
                said = json.dumps(("memory", ""))
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            connection.send_bytes(said.encode())


SHARED = TemplateProcess()
atexit.register(SHARED.close)
