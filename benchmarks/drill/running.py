"""A run under `launch ssh` on the hosts of a laboratory, observed from outside. Read next: `drill_loop.py`."""

import json
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.drill import run_processes
from benchmarks.drill.experiments import Drilled
from benchmarks.drill.laboratory import Laboratory
from benchmarks.drill.run_processes import RunProcess
from benchmarks.launched import Launched, Line, last_step, launch, places

STEP = re.compile(r" I step (\d+)/")
CONTINUING = re.compile(r" I continuing from step (\d+) of ")
# The launcher's line when it restarts the run: the first failure, in words.
AGAIN = re.compile(r"^starting again in .*?: (.*)")
CODE = re.compile(r"exit code (\d+)")
# The hosts are slower than real ones, and so are their watchdogs' limits shorter.
TIMEOUTS = ("--timeouts.lost-s", "15", "--timeouts.stuck-s", "12", "--timeouts.phase-s", "60")
TIMEOUTS += ("--timeouts.rendezvous-s", "90", "--timeouts.data-s", "90", "--timeouts.handshake-s", "60")
GRACE_S = 5


class Running:
    """A run of `num_hosts` hosts; all others of the laboratory are spare. `name` is that of its folders."""

    def __init__(self, lab: Laboratory, drilled: Drilled, num_hosts: int, name: str):
        self._lab, self._drilled, self._num_hosts = lab, drilled, num_hosts
        self.base = lab.shared / name
        self._output = lab.folder / f"{name}_output"
        self.directory = self.base / "runs" / drilled.name / "x"
        self._launches: list[Launched] = []

    def start(self, *flags: str) -> None:
        """Start the launcher, again with the same command if it was killed."""
        lab = self._lab
        names = ",".join(host.name for host in lab.network.hosts)
        options = ["--hosts", names, "--nodes", self._num_hosts, "--processes-per-node", 1, "--devices-per-process", 1]
        options += ["--ssh-command", lab.ssh, "--max-restarts", 40, "--grace-s", GRACE_S, "--log-dir", self._output]
        options += ["--env", *(f"{name}={value}" for name, value in lab.environ.items())]
        command = launch("ssh", *options, "--", *self._drilled.words, *TIMEOUTS, *flags, *places(self.base))
        self._launches.append(Launched([*lab.network.desk.enter, *command], lab.environ))

    @property
    def launched(self) -> Launched:
        """The launcher that was started last."""
        return self._launches[-1]

    @property
    def lines(self) -> list[Line]:
        """What it has said."""
        return self.launched.lines

    def close(self) -> None:
        """End everything at once."""
        for launched in self._launches:
            launched.close()

    def kill_launcher(self) -> None:
        """SIGKILL to the launcher at the desk."""
        self.launched.process.send_signal(signal.SIGKILL)
        self.launched.end(timeout_s=60)

    def processes(self) -> list[RunProcess]:
        """The training processes of all starts."""
        return run_processes.find(self._lab.network.hosts)

    def present(self) -> dict[int, RunProcess]:
        """Those of the newest start, by rank."""
        everyone = self.processes()
        if not everyone:
            return {}
        token = max(everyone, key=lambda one: one.began).token
        return {one.rank: one for one in everyone if one.token == token}

    def checkpoints(self) -> list[int]:
        """The steps of the complete checkpoints, oldest first."""
        manifests = self._behind(self.directory).glob("*/manifest.json")
        return sorted(int(path.parent.name) for path in manifests if path.parent.name.isdecimal())

    def last_step(self) -> int:
        """The last step with a complete line in `metrics.jsonl`."""
        return last_step(self.files())

    def files(self) -> Path:
        """The run directory, as the disk has it, also while that misbehaves."""
        return self._behind(self.directory)

    def metrics(self) -> dict[int, dict[str, Any]]:
        """The metrics of each step, without those that depend on the machine."""
        return metrics_in(self.files())

    def said(self, count: int = 60) -> str:
        """The last lines of the launcher."""
        return self.launched.said(count)

    def _behind(self, path: Path) -> Path:
        return self._lab.behind / path.relative_to(self._lab.shared)


def metrics_in(directory: Path) -> dict[int, dict[str, Any]]:
    """The metrics of each step of a run directory, without those that depend on the machine."""
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return {
        line["step"]: {name: value for name, value in line.items() if not _MEASURED.fullmatch(name)}
        for line in lines
        if "loss" in line
    }


# Metrics that depend on the machine.
_MEASURED = re.compile(r"(time|data)/.*|.*_per_s|mfu|hfu")


def steps_told(lines: Sequence[Line]) -> list[int]:
    """The steps that process 0 has told of."""
    return [int(found[1]) for line in lines if (found := STEP.search(line.text))]
