"""A diffusion policy from states: killed and resumed equals uninterrupted with the average; it acts in closed loop."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from command import ROOT, environment, losses, places, train

from openpi_train import registry
from openpi_train.interop.checkpoint_formats import open_checkpoint

pytestmark = [pytest.mark.slow]
RUN = f"{Path(__file__).with_name('state_runs.py')}:states"
LAST = 400


def directory(base):
    return base / "runs" / "states" / "x"


def test_killed_and_resumed_equals_uninterrupted_with_its_average(tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    train(straight, RUN)
    command = [sys.executable, "-m", "openpi_train", RUN, *places(killed)]
    process = subprocess.Popen(
        command, env=environment(), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    manifest = directory(killed) / "100" / "manifest.json"
    deadline = time.monotonic() + 240
    while not manifest.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    assert not (directory(killed) / str(LAST) / "manifest.json").exists()
    train(killed, RUN, "--resume")
    assert losses(killed, "states") == losses(straight, "states")
    model = registry.load(RUN).model
    resumed, whole = (open_checkpoint(directory(base) / str(LAST), model) for base in (killed, straight))
    assert resumed.train_state is not None and whole.train_state is not None
    for found, wanted in ((resumed.params, whole.params), (resumed.train_state, whole.train_state)):
        assert found.keys() == wanted.keys()
        for name, leaf in wanted.items():
            np.testing.assert_array_equal(found[name].whole(), leaf.whole(), err_msg=name)
    averages = [(leaf.whole(), whole.train_state[f"params/{name}"].whole()) for name, leaf in whole.params.items()]
    assert any((average != trained).any() for average, trained in averages)
    outcomes = [
        json.loads((directory(base) / "eval" / str(LAST) / "closed_loop.json").read_text())
        for base in (killed, straight)
    ]
    assert outcomes[0] == outcomes[1] and outcomes[0]["overall"]["trials"] == 4
