"""Commits of repositories on the hub: noted, kept for the life of a process, and those of a run's first start used."""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fake_hub import serving

from openpi_train.data.core import hub
from openpi_train.training import rundir

REPO = Path(__file__).resolve().parents[3]
FIRST, SECOND = "1" * 40, "2" * 40

# Fetches by both ways, before and after a push, and again as a run that goes on; each line is what it read.
PROGRAM = """
import json, logging, sys, urllib.request
from pathlib import Path
from openpi_train.data.core import hub
from openpi_train.interop import checkpoint_hub
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
hub.pin(json.loads(sys.argv[1]))
address = sys.argv[2]
folder = hub.hub_folder(address, repo_type="model", patterns=["*.json"])
print(folder.name, (folder / "config.json").read_text())
print(checkpoint_hub.fetch(address).name)
print(json.dumps(hub.commits()))
"""


def fetched(server, cache, pinned="{}", address="hub:me/model"):
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    environment |= {"HF_ENDPOINT": server.url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, pinned, address],
        env={**environment, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def test_a_run_that_goes_on_reads_the_commit_of_its_first_start(tmp_path):
    pytest.importorskip("huggingface_hub", reason="huggingface_hub (the extra `hub`) is not installed")
    with serving() as server:
        server.repos["me/model"] = {"config.json": b"old"}
        (read, commit, commits), said = fetched(server, tmp_path)
        assert read == f"{commit} old" and commits == f'{{"model me/model": "{commit}"}}'
        assert f"model me/model on the hub: its newest commit is {commit}" in said
        server.repos["me/model"] = {"config.json": b"new"}
        (read, again, kept), said = fetched(server, tmp_path, commits)
        assert (read, again, kept) == (f"{commit} old", commit, commits)
        assert f"model me/model on the hub: the run's commit is {commit}" in said
        (read, newest, _), _ = fetched(server, tmp_path)  # another run
        assert read == f"{newest} new" and newest != commit
        (read, _, kept), _ = fetched(server, tmp_path, commits, f"hub:me/model@{newest}")  # what is given goes first
        assert read == f"{newest} new" and kept == commits


@pytest.fixture
def unpinned(monkeypatch):
    monkeypatch.setattr(hub, "_commits", {})


@pytest.mark.usefixtures("unpinned")
def test_a_commit_that_was_read_before_the_runs_was_known_is_told(caplog):
    hub.note_commit("me/texts", None, Path(f"/cache/datasets--me--texts/snapshots/{SECOND}"), "dataset")
    hub.note_commit("me/given", "v1", Path(f"/cache/snapshots/{SECOND}"))
    hub.note_commit("me/file", None, Path(f"/cache/snapshots/{SECOND}/tokenizer.model"))
    with caplog.at_level(logging.WARNING):
        hub.pin({"dataset me/texts": FIRST, "model me/file": SECOND})
    (record,) = caplog.records
    assert re.search(f"dataset me/texts has changed .*{FIRST}", record.message)
    assert hub.commits() == {"dataset me/texts": FIRST, "model me/file": SECOND}
    assert hub.revision_of("me/texts", None, "dataset") == FIRST and hub.revision_of("me/texts", None) is None


@pytest.mark.usefixtures("unpinned")
def test_processes_of_different_commits_do_not_start(monkeypatch):
    said = [{"model me/model": FIRST}, {"model me/model": SECOND, "model me/other": FIRST}]
    monkeypatch.setattr(rundir.agree, "gather", lambda name, value: said)
    with pytest.raises(rundir.DataError, match=rf"it is {SECOND} on process 1, {FIRST} on process 0"):
        rundir.check_commits()
