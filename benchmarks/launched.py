"""A launcher and its run, observed from outside: its lines and its end. Read next: `startup.py`, `drill/running.py`."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT

DEBUG, SMALL = "debug", f"{Path(__file__).with_name('launched_small.py')}:small"
_POLL_S = 0.02
_TAIL_BYTES = 1 << 14


@dataclasses.dataclass(frozen=True)
class Line:
    """A line that the launcher has shown, and its time (`time.monotonic`)."""

    text: str
    at: float


def launch(kind: str, *words: object) -> list[str]:
    """The command `openpi_train launch <kind> <words>`."""
    return [sys.executable, "-m", "openpi_train", "launch", kind, *map(str, words)]


def places(base: Path) -> list[str]:
    """The flags that keep a run inside `base`."""
    return ["--exp-name", "x", "--checkpoint-base-dir", f"{base}/runs", "--assets-base-dir", f"{base}/assets"]


def last_step(directory: Path) -> int:
    """The last step with a complete line in the `metrics.jsonl` of a run directory; 0 if there is none."""
    try:
        with (directory / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return 0
    return max((int(json.loads(line)["step"]) for line in lines if line.startswith(b'{"step"')), default=0)


class Launched:
    """A command that runs until the end of the `with`, and what it has said."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]):
        self.lines: list[Line] = []
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> "Launched":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it at once."""
        self.process.kill()
        self.end(timeout_s=60)

    def end(self, timeout_s: float) -> int:
        """Wait for the end and return the exit code, after reading all output."""
        code = self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        return code

    def await_place(self, pattern: str | re.Pattern[str], timeout_s: float, since: int = 0) -> int | None:
        """The number of the first line from `since` on with the pattern; None at the end or after the time-out."""
        deadline = time.monotonic() + timeout_s
        while True:
            over = not self._reader.is_alive()
            for place in range(since, len(self.lines)):
                since = place + 1
                if re.search(pattern, self.lines[place].text):
                    return place
            if over or time.monotonic() > deadline:
                return None
            time.sleep(_POLL_S)

    def wait(self, condition: Callable[[], Any], timeout_s: float) -> bool:
        """Whether the condition became true in time, before the command ended."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                return bool(condition())
            time.sleep(_POLL_S)
        return True

    def said(self, count: int = 30) -> str:
        """The last lines."""
        return "\n".join(line.text for line in self.lines[-count:])

    def stop(self) -> int:
        """Ask it to save and stop, and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.end(timeout_s=120)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(Line(line.rstrip("\n"), time.monotonic()))
