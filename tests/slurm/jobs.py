"""Jobs on the test's Slurm, submitted as users do. Read next: `test_requeue.py`."""

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from runs.command import ROOT, environment


class Slurm:
    """Submits what `launch slurm` writes and asks Slurm about it; all output lies in `folder`."""

    def __init__(self, variables: dict[str, str], folder: Path):
        self.folder = folder
        self.variables = environment(**variables)

    def run(self, *command: str | Path) -> str:
        """What a command of Slurm's prints; it must succeed."""
        done = subprocess.run(
            [str(word) for word in command], env=self.variables, cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command} gave {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout.strip()

    def launch(self, *options: str, arguments: tuple[str, ...]) -> str:
        """What `launch slurm <options> -- <arguments>` prints."""
        launch = [sys.executable, "-m", "openpi_train", "launch", "slurm", "--no-check"]
        words = [*launch, "--output-dir", str(self.folder), *options]
        return self.run(*words, "--", *arguments)

    def submit(self, *options: str, arguments: tuple[str, ...]) -> str:
        """The number of the job that `launch slurm --submit` says it has submitted."""
        printed = self.launch(*options, "--submit", arguments=arguments)
        found = re.search(r"submitted: job (\d+)", printed)
        assert found, printed
        return found[1]

    def state(self, job: str) -> dict[str, str]:
        """What `scontrol show job` knows."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", job)))

    def output(self, job: str) -> str:
        """All that the job has written so far."""
        files = list(self.folder.glob(f"*_{job}.out"))
        return files[0].read_text() if files else ""

    def await_end(self, job: str, limit_s: float = 600) -> dict[str, str]:
        """The job's last state, once it has one."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.wait_for(job, lambda: self.state(job)["JobState"] in over, limit_s)
        return self.state(job)

    def wait_for(self, job: str, condition: Callable[[], bool], limit_s: float = 600) -> None:
        """Return once `condition` holds; fails with the job's output after `limit_s`."""
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, f"{self.state(job)}\n{self.output(job)[-6000:]}"
            time.sleep(0.1)
