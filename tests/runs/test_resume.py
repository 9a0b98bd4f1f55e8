"""Killed and resumed equals uninterrupted, bit for bit."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from command import ROOT, environment, losses, train
from small_runs import SMALL

pytestmark = [pytest.mark.slow]
# There is time for the kill: it waits for each checkpoint before it begins the next.
RUN = ("debug", "--num-train-steps", "60", "--save-interval", "10", "--keep-last", "3")
# A line is the mean of three steps: that of step 12 is of steps before and after the checkpoint that is resumed from.
RUN += ("--log-interval", "3", "--data.validation-fraction", "0")


def test_sixty_steps_equal_ten_or_more_a_kill_and_a_resume(tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    train(straight, *RUN)
    flags = ("--exp-name", "x", "--checkpoint-base-dir", killed / "runs", "--assets-base-dir", killed / "assets")
    command = ["nice", "-n", "10", sys.executable, "-m", "openpi_train", *RUN, *map(str, flags)]
    process = subprocess.Popen(
        command, env=environment(), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    manifest = killed / "runs" / "debug" / "x" / "10" / "manifest.json"
    deadline = time.monotonic() + 240
    while not manifest.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    assert 9 <= max(losses(killed)) < 60
    done = train(killed, *RUN, "--resume")
    assert re.search(r"continuing from step [1-5]0 of 60", done.stderr)
    assert losses(killed) == losses(straight)
    assert list(losses(killed)) == list(range(3, 61, 3))


def test_sigterm_saves_and_exits_with_the_requeue_code(tmp_path):
    flags = ("--exp-name", "x", "--checkpoint-base-dir", tmp_path / "runs", "--assets-base-dir", tmp_path / "assets")
    command = [
        sys.executable,
        "-m",
        "openpi_train",
        SMALL,
        "--data.pause-s",
        "0.05",
        "--num-train-steps",
        "100000",
        "--save-interval",
        "100000",
    ]
    process = subprocess.Popen(
        [*command, *map(str, flags)],
        env=environment(OPENPI_TRAIN_GRACE_S="0.001"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    metrics = tmp_path / "runs" / "small" / "x" / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and not (metrics.exists() and '"loss"' in metrics.read_text()):
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    output = process.communicate(timeout=300)[0].decode()
    assert process.returncode == 75, output[-3000:]
    took = r"(\S+) s after the request \((\S+) s to the end of the step, \S+ s to save\)"
    shown = re.search(rf"stopped after step \d+ of 100000 with a good checkpoint, {took}; continue", output)
    assert shown, output[-3000:]
    results = json.loads((tmp_path / "runs" / "small" / "x" / "results.json").read_text())
    recorded = results["summary"]["stop_request"]
    assert recorded["until_stopped_s"] == pytest.approx(float(shown[2]), abs=0.06)  # one digit is shown
    # The line is written a little later than the file, which is flushed to the disk in between.
    assert recorded["until_stopped_s"] < recorded["until_saved_s"] <= float(shown[1]) + 0.06
    assert "but after 0 s the processes are killed" in output and "raise --stop-before-s" in output
    steps = losses(tmp_path, "small")
    assert (tmp_path / "runs" / "small" / "x" / str(max(steps)) / "manifest.json").exists()


def test_an_evaluation_that_a_stop_left_out_is_made_up_for(tmp_path):
    # Nearly all of the time goes into evaluations, so that is where the signal arrives.
    evaluate = ("--eval.interval", "1", "--eval.num-rows", "400", "--batch-size", "2")
    many = (SMALL, *evaluate, "--save-interval", "100000", "--num-train-steps", "100000")
    flags = ("--exp-name", "x", "--checkpoint-base-dir", tmp_path / "runs", "--assets-base-dir", tmp_path / "assets")
    process = subprocess.Popen(
        [sys.executable, "-m", "openpi_train", *many, *map(str, flags)],
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 480
    while len(evaluations(tmp_path)) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(480) == 75
    last = max(losses(tmp_path, "small"))
    assert evaluations(tmp_path)[-1] in (last - 1, last)
    train(tmp_path, *many[:-1], str(last + 1), "--resume")
    assert evaluations(tmp_path) == list(range(last + 2))


def evaluations(base):
    """The steps with held-out results."""
    metrics = base / "runs" / "small" / "x" / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return [line["step"] for line in map(json.loads, lines) if "val/loss" in line]
