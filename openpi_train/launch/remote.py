"""The remote side of `launch ssh`: runs one host's processes and reports to the launcher. Read next: `ssh.py`.

Both sides exchange lines over ssh's pipes. Input: the job (with its token and environment, which `ps` does not show),
then signals, and a heartbeat every few seconds. Output, with a prefix that no login message begins with: that the
processes run, each line of each process, changes of its status, and its exit code. If the launcher is silent for a
minute, or stdin ends, the run here is ended: SIGTERM, so that the processes save, and after the grace period
SIGKILL.
"""

import contextlib
import dataclasses
import json
import queue
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from openpi_train import faults
from openpi_train.launch.child import Child
from openpi_train.launch.processes import forwarded_signals
from openpi_train.launch.spec import LaunchSpec, share_of
from openpi_train.launch.status import NOTHING, VARIABLE, Status, read

MARK = b"\x1e"  # the separator of RFC 7464 for JSON texts in a stream
BEAT_S = 5.0
SILENCE_S = 60.0  # the same as ssh's own keep-alive on the launcher's side
STARTED, LINE, STATUS, ENDED = "started", "line", "status", "ended"


class Share:
    """The processes of this host, and the connection to the launcher."""

    def __init__(self, job: dict[str, Any], folder: Path):
        """`folder` is for the status files of the processes."""
        self._folder = folder
        self._told: dict[int, Status] = {}
        self._telling = threading.Lock()  # a status must not be sent after a newer one
        self.grace_s: float = job["grace_s"]
        self.alive: set[int] = set()
        self.mail: queue.Queue[bytes | None] = queue.Queue()
        self._lock = threading.Lock()
        self.children = [
            self._start(command.rank, command.argv, {**job["env"], **command.env})
            for command in share_of(LaunchSpec(**job["spec"]), job["node"])
        ]

    def run(self) -> None:
        """Forward what the launcher sends, until all processes have ended."""
        self._tell(STARTED)
        for child in self.children:
            child.watch()
        threading.Thread(target=self._listen, daemon=True).start()
        heard_at = time.monotonic()
        while self.alive:
            for rank in tuple(self.alive):
                self._tell_status(rank)
            with contextlib.suppress(queue.Empty):
                line = self.mail.get(timeout=1.0)
                if line is None:
                    break
                heard_at = time.monotonic()
                self.send(json.loads(line).get("signal", 0))
            if time.monotonic() - heard_at > SILENCE_S:
                break
        self._end()

    def send(self, signum: int) -> None:
        """Send a signal to all processes; signal 0 changes nothing."""
        for child in self.children:
            child.send(signum)

    def _start(self, rank: int, argv: tuple[str, ...], env: dict[str, str]) -> Child:
        def took(line: bytes, is_error: bool) -> None:
            self._tell(LINE, rank, is_error, line.decode(errors="replace"))

        def ended(code: int) -> None:
            self._tell_status(rank)
            self.alive.discard(rank)
            self._tell(ENDED, rank, code)
            self.mail.put(b"{}")

        self.alive.add(rank)
        return Child(argv, {**env, VARIABLE: str(self._status_file(rank))}, took, ended)

    def _status_file(self, rank: int) -> Path:
        return self._folder / f"{rank}.json"

    def _tell_status(self, rank: int) -> None:
        with self._telling:
            status = read(self._status_file(rank))
            if status != self._told.get(rank, NOTHING):
                self._told[rank] = status
                self._tell(STATUS, rank, dataclasses.asdict(status))

    def _listen(self) -> None:
        for line in sys.stdin.buffer.raw:  # pyright: ignore[reportAttributeAccessIssue]
            self.mail.put(line)
        self.mail.put(None)

    def _tell(self, *news: object) -> None:
        with self._lock, contextlib.suppress(OSError):  # no launcher: the end of stdin ends the run
            sys.stdout.buffer.write(MARK + json.dumps(news).encode() + b"\n")
            sys.stdout.buffer.flush()

    def _end(self) -> None:
        self.send(signal.SIGTERM)
        deadline = time.monotonic() + self.grace_s
        while self.alive and time.monotonic() < deadline:
            time.sleep(0.05)
        for child in self.children:
            child.close()


def main() -> int:
    """Run the job in the first line of stdin; returns 0 unless there is none. Exit codes of processes are reported."""
    first = sys.stdin.buffer.raw.readline()  # pyright: ignore[reportAttributeAccessIssue]
    if not first.endswith(b"\n"):
        return faults.USAGE
    with tempfile.TemporaryDirectory(prefix="openpi_train_", ignore_cleanup_errors=True) as folder:
        share = Share(json.loads(first), Path(folder))
        with forwarded_signals(share.children):
            share.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
