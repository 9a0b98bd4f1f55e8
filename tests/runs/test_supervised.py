"""A run that is killed and started again by its launcher ends as if nothing had happened."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command import ROOT, environment, losses, places, train
from small_runs import SMALL

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]
RUN = (SMALL, "--num-train-steps", "30", "--save-interval", "10", "--keep-last", "3")
# Steps long enough that there is time for the kills between the checkpoints and the end.
SLOWLY = ("--data.pause-s", "0.2")


def test_a_run_killed_twice_ends_well_with_the_losses_of_an_undisturbed_one(tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    train(straight, *RUN, devices=2)  # by promise the same on one process
    launch = ("launch", "local", "--processes", "2", "--devices-per-process", "1", "--max-restarts", "2")
    launch += ("--log-dir", str(killed / "output"))
    with subprocess.Popen(
        [sys.executable, "-m", "openpi_train", *launch, "--", *RUN, *SLOWLY, *places(killed), "--overwrite"],
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as launcher:
        try:
            for step, victim in ((10, 1), (20, 0)):
                await_checkpoint(killed, step, launcher)
                os.kill(process(launcher.pid, victim), signal.SIGKILL)
            output = launcher.communicate(timeout=480)[0]
        finally:
            launcher.kill()
    assert launcher.returncode == 0, output[-5000:]
    assert output.count("starting again in 1 s") == 2
    assert losses(killed, "small") == losses(straight, "small")
    assert len(losses(killed, "small")) == 30


def await_checkpoint(base: Path, step: int, launcher: subprocess.Popen) -> None:
    """Return when the checkpoint of this step is whole."""
    manifest = base / "runs" / "small" / "x" / str(step) / "manifest.json"
    deadline = time.monotonic() + 480
    while not manifest.exists():
        assert launcher.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)


def process(parent: int, rank: int) -> int:
    """The pid of the launcher's process of this rank."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_child = int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == parent
            if is_child and f"RANK={rank}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                return int(folder.name)
        except OSError:  # it has ended meanwhile
            continue
    raise AssertionError(f"the launcher has no process {rank}")
