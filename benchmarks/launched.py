"""A run under `launch local`, observed from outside: lines, processes, files.

Read next: `fault_drill.py` and `startup.py`, which start such runs.
"""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT

DEBUG, SMALL = "debug", f"{Path(__file__).with_name('launched_small.py')}:small"
_POLL_S = 0.02
_INJECTED = Path(__file__).with_name("injected")
_TAIL_BYTES = 1 << 14


@dataclasses.dataclass(frozen=True)
class Line:
    """A line that the launcher has shown, and its time (`time.monotonic`)."""

    text: str
    at: float


# Runs the command that follows in a network with only a loopback interface.
OWN_NETWORK = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "in_own_network")


def run_directory(base: Path, experiment: str) -> Path:
    """The directory of a run of this experiment (`DEBUG` or `SMALL`) below `base`."""
    return base / "runs" / experiment.rpartition(":")[2] / "x"


class Launched:
    """A launcher and its processes; the run is below `base`. Ended at the end of the `with`.

    `words` are the experiment and its flags; `prefix` is a command that starts the launcher, such as `OWN_NETWORK`.
    """

    def __init__(
        self,
        base: Path,
        launcher: Sequence[str],
        words: Sequence[str],
        prefix: Sequence[str] = (),
        **environ: str,
    ):
        self.directory = run_directory(base, words[0])
        self._faults = base.with_name(f"{base.name}-faults")
        self._faults.mkdir(parents=True, exist_ok=True)
        inside = os.pathsep.join([str(_INJECTED), *filter(None, [os.environ.get("PYTHONPATH")])])
        environ = {"PYTHONPATH": inside, "DRILL_FAULTS": str(self._faults), **environ}
        places = ["--exp-name", "x", "--checkpoint-base-dir", base / "runs", "--assets-base-dir", base / "assets"]
        self.output = base.with_name(f"{base.name}-output")  # beside it: `base` may be a disk that fills up
        words = [*launcher, "--devices-per-process", "1", "--log-dir", str(self.output), "--", *words]
        self.lines: list[Line] = []
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "openpi_train", "launch", "local", *words, *map(str, places)],
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
        """End the launcher and its processes at once."""
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
        """Whether the condition became true in time, before the launcher ended."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                return bool(condition())
            time.sleep(_POLL_S)
        return True

    def processes(self) -> dict[int, int]:
        """The pids of the run's live processes, by rank."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                if int(parent) != self.process.pid or state == "Z":
                    continue
                variables = (folder / "environ").read_bytes().split(b"\0")
            except OSError:  # it has ended meanwhile
                continue
            found |= {int(word[5:]): int(folder.name) for word in variables if word.startswith(b"RANK=")}
        return found

    def checkpoints(self) -> list[int]:
        """The steps of the complete checkpoints, oldest first."""
        manifests = self.directory.glob("*/manifest.json")
        return sorted(int(path.parent.name) for path in manifests if path.parent.name.isdecimal())

    def inject(self, rank: int, kind: str, text: str, **when: int) -> None:
        """Have a process do harm to itself: see `injected/sitecustomize.py`."""
        place = self._faults / f"rank_{rank}"
        draft = place.with_suffix(".draft")
        draft.write_text(json.dumps({"kind": kind, "text": text, **when}))
        draft.replace(place)

    def last_step(self) -> int:
        """The last step with a complete line in `metrics.jsonl`."""
        try:
            with (self.directory / "metrics.jsonl").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                lines = file.read().split(b"\n")[:-1]
        except FileNotFoundError:
            return 0
        return max((int(json.loads(line)["step"]) for line in lines if line.startswith(b'{"step"')), default=0)

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
