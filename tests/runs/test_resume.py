"""Killed and resumed equals uninterrupted, bit for bit."""

import os
import signal
import subprocess
import sys
import time

import pytest
from command import ROOT, environment, losses, train

pytestmark = [pytest.mark.slow]
# Steps long enough that there is time for the kill between the first checkpoint and the end.
RUN = ("debug", "--batch-size", "128", "--num-train-steps", "20", "--save-interval", "10", "--keep-last", "3")


def test_twenty_steps_equal_ten_a_kill_and_a_resume(tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    train(straight, *RUN)
    flags = ("--exp-name", "x", "--checkpoint-base-dir", killed / "runs", "--assets-base-dir", killed / "assets")
    command = [sys.executable, "-m", "openpi_train", *RUN, *map(str, flags)]
    process = subprocess.Popen(
        command, env=environment(), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    manifest = killed / "runs" / "debug" / "x" / "10" / "manifest.json"
    deadline = time.monotonic() + 240
    while not manifest.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    assert 10 <= max(losses(killed)) < 20
    train(killed, *RUN, "--resume")
    assert losses(killed) == losses(straight)
    assert len(losses(killed)) == 20


def test_sigterm_saves_and_exits_with_the_requeue_code(tmp_path):
    flags = ("--exp-name", "x", "--checkpoint-base-dir", tmp_path / "runs", "--assets-base-dir", tmp_path / "assets")
    command = [
        sys.executable,
        "-m",
        "openpi_train",
        "debug",
        "--num-train-steps",
        "100000",
        "--save-interval",
        "100000",
    ]
    process = subprocess.Popen(
        [*command, *map(str, flags)], env=environment(), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    metrics = tmp_path / "runs" / "debug" / "x" / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and not (metrics.exists() and '"loss"' in metrics.read_text()):
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    output = process.communicate(timeout=120)[0].decode()
    assert process.returncode == 75, output[-3000:]
    assert "--resume" in output
    steps = losses(tmp_path)
    assert (tmp_path / "runs" / "debug" / "x" / str(max(steps)) / "manifest.json").exists()
