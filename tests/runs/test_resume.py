"""Killed and resumed equals uninterrupted, bit for bit."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from command import ROOT, check, environment, losses, openpi_train, places, train
from small_runs import SMALL

from openpi_train import registry
from openpi_train.checkpoints.checkpoint_formats import open_checkpoint
from openpi_train.faults import DONE, HARDWARE

pytestmark = [pytest.mark.slow]
RUN = f"{Path(__file__).with_name('state_runs.py')}:states"
LAST = 400


def run_of(base):
    return base / "runs" / "states" / "x"


def test_killed_and_resumed_equals_uninterrupted_with_its_average(tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    train(straight, RUN)
    command = ["nice", "-n", "10", sys.executable, "-m", "openpi_train", RUN, *places(killed)]
    process = subprocess.Popen(
        command, env=environment(), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    manifest = run_of(killed) / "100" / "manifest.json"
    deadline = time.monotonic() + 240
    while not manifest.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    assert not (run_of(killed) / str(LAST) / "manifest.json").exists()
    # A line is the mean of thirty steps: that of step 120 is of steps before and after a checkpoint.
    assert 90 <= max(losses(killed, "states")) < LAST
    done = train(killed, RUN, "--resume")
    assert re.search(rf"continuing from step [123]00 of {LAST}", done.stderr)
    assert losses(killed, "states") == losses(straight, "states")
    assert list(losses(killed, "states")) == [*range(30, LAST, 30), LAST]
    model = registry.load(RUN).model
    resumed, whole = (open_checkpoint(run_of(base) / str(LAST), model) for base in (killed, straight))
    assert resumed.train_state is not None and whole.train_state is not None
    for found, wanted in ((resumed.params, whole.params), (resumed.train_state, whole.train_state)):
        assert found.keys() == wanted.keys()
        for name, leaf in wanted.items():
            np.testing.assert_array_equal(found[name].whole(), leaf.whole(), err_msg=name)
    averages = [(leaf.whole(), whole.train_state[f"params/{name}"].whole()) for name, leaf in whole.params.items()]
    assert any((average != trained).any() for average, trained in averages)
    outcomes = [
        json.loads((run_of(base) / "eval" / str(LAST) / "closed_loop.json").read_text()) for base in (killed, straight)
    ]
    assert outcomes[0] == outcomes[1] and outcomes[0]["overall"]["trials"] == 4


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


def test_a_restart_that_finds_fewer_devices_is_failed_hardware(tmp_path, monkeypatch):
    """By hand a run goes on on fewer devices; a launcher starts it again unchanged, so one of them has gone."""
    run = (SMALL, "--save-interval", "2")
    train(tmp_path, *run, "--num-train-steps", "2", devices=2)
    monkeypatch.setenv("OPENPI_TRAIN_RESTART", "1")
    again = (*run, "--num-train-steps", "4", *places(tmp_path), "--resume")
    done = openpi_train(*again, "--devices-per-process", "1")
    check(done, HARDWARE, "this restart finds 1 of the 2 devices that each process of the run had", "without this host")
    check(openpi_train(*again, "--devices-per-process", "2"), DONE, "continuing from step 2 of 4")
