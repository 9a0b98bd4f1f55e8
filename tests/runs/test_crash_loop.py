"""A run that dies again and again at one place goes one checkpoint back, names the batch, and in the end gives up."""

import re

import pytest
from command import openpi_train, places, train
from small_runs import SMALL

from openpi_train.launch.status import MAX_RESTARTS_VARIABLE

pytestmark = pytest.mark.slow

RUN = (SMALL, "--save-interval", "5", "--keep-last", "2", "--data.process", "")
POISONED = (*RUN, "--data.fault", "kills", "--num-train-steps", "30", "--resume")


def test_starts_that_end_at_one_place_go_back_and_name_the_batch(tmp_path, monkeypatch):
    run = tmp_path / "runs" / "small" / "x"
    train(tmp_path, *RUN, "--num-train-steps", "20")
    # As Kubernetes does, which does not count them itself.
    monkeypatch.setenv(MAX_RESTARTS_VARIABLE, "3")
    said = []
    for _ in range(4):
        done = openpi_train(*POISONED, *places(tmp_path))
        assert done.returncode == -9, done.stderr
        said.append(done.stdout + done.stderr)
    assert "in a row" not in said[0]
    assert "I the start before this one ended without a checkpoint after step 20" in said[1]
    assert "2 starts in a row" in said[2] and "each step is recorded and waited for" in said[2]
    # The third start has found the step, and the newest checkpoint may be to blame for it.
    assert re.search(r"3 starts .*checkpoint after step 20; .*step 23", said[3])
    assert "continuing from checkpoint 15" in said[3] and "continuing from step 15 of 30" in said[3]
    assert "step 23 ended the start before this one; the rows of its batch:" in said[3]
    assert "checkpoint 20 is after step 15 and now lies in" in said[3]
    assert not list(run.glob("20.*")), "it goes once the new one is complete"
    done = openpi_train(*POISONED, *places(tmp_path))
    assert done.returncode == 72, done.stderr
    assert "4 starts in a row" in done.stderr and "the last 2 in step 23" in done.stderr
    # By hand it goes on, and once the data is well it leaves nothing behind.
    train(tmp_path, *RUN, "--data.fault", "", "--num-train-steps", "30", "--resume")
    assert not list(run.glob("*.passed-over*")) and not (run / ".crash_loop.json").exists()
    assert {"25", "30"} <= {path.name for path in run.iterdir()}
