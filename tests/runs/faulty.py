"""Processes of a run, started without a launcher, that something happens to."""

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import forks
from command import environment, losses, places
from small_runs import SMALL

from openpi_train.launch.processes import free_port

ENDLESS = ("--batch-size", "6", "--num-train-steps", "100000", "--save-interval", "100000", "--no-tensorboard")
ENDLESS += ("--data.pause-s", "0.02")


class Processes:
    """The processes of one run in `base`, each with its output in a file."""

    def __init__(self, base: Path, count: int, *arguments: str, experiment: str = SMALL):
        self.base, self.experiment = base, experiment.rpartition(":")[2]
        command = [sys.executable, "-m", "openpi_train", experiment, *ENDLESS, *places(base), *arguments]
        common = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        base.mkdir(exist_ok=True)
        self.outputs = [base / f"output_{index}.txt" for index in range(count)]
        self.processes = []
        for index, output in enumerate(self.outputs):
            with output.open("w") as file:
                words = list(map(str, [*command, "--devices-per-process", "1"]))
                environ = {**environment(), **common, "RANK": str(index)}
                self.processes.append(forks.start(words, environ, file.fileno()))

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def log(self, index: int) -> str:
        """The log file of a process; what it printed, before there is one."""
        path = self.base / "runs" / self.experiment / "x" / "logs" / f"process_{index}.log"
        return path.read_text() if path.exists() else self.outputs[index].read_text()

    def await_training(self) -> None:
        """Return when some steps have been taken."""
        metrics = self.base / "runs" / self.experiment / "x" / "metrics.jsonl"
        self.wait(lambda: metrics.exists() and len(losses(self.base, self.experiment)) >= 5, 480)

    def wait(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Return when `condition` holds; fails with the processes' output where one has ended before."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            ended = [process.poll() for process in self.processes if process.poll() is not None]
            assert not ended and time.monotonic() < deadline, f"ended: {ended}\n{self.said()}"
            time.sleep(0.05)

    def send(self, index: int, signum: int) -> None:
        self.processes[index].send_signal(signum)

    def codes(self, timeout_s: float, *without: int) -> list[int]:
        """The exit codes of all processes but `without`, which must end in time."""
        deadline = time.monotonic() + timeout_s
        codes = []
        for index, process in enumerate(self.processes):
            if index not in without:
                try:
                    codes.append(process.wait(max(0.0, deadline - time.monotonic())))
                except subprocess.TimeoutExpired:
                    raise AssertionError(f"process {index} has not ended in {timeout_s} s\n{self.said()}") from None
        return codes

    def said(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in self.outputs)

    def check_last_words(self, index: int, *patterns: str) -> None:
        """The log of a process has the words, and where its threads, the main one among them, were."""
        log = self.log(index)
        for pattern in patterns:
            assert re.search(pattern, log), f"{pattern!r} is not in the log of process {index}:\n{log[-6000:]}"
        assert "where every thread of this process is:" in log and "in run_guarded" in log, log[-6000:]
