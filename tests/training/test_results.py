"""`results.json` on a disk with and without room."""

import json

import jax
import pytest
from openpi_train_configs.debug import debug

from openpi_train.parallel.mesh import make_mesh
from openpi_train.parallel.strategy import Plan
from openpi_train.runtime import preempt
from openpi_train.runtime.exits import CheckpointError
from openpi_train.training.results import write_results


def write(path):
    nothing = {"last_metrics": {}, "evaluations": [], "proportions": {}, "bad_records": 0}
    plan = Plan(mesh=make_mesh(2, jax.devices()[:4]), strategy="zero2")
    write_results(path, debug, plan, step=7, seconds=1.0, checkpoints=[7], best=None, **nothing)


def test_a_stop_is_recorded_with_the_seconds_it_took(tmp_path, monkeypatch):
    write(tmp_path / "results.json")
    assert json.loads((tmp_path / "results.json").read_text())["summary"]["stop_request"] is None
    monkeypatch.setattr(preempt, "stop_times", lambda: preempt.StopTimes(until_stopped_s=2.0, until_saved_s=3.5))
    write(tmp_path / "results.json")
    summary = json.loads((tmp_path / "results.json").read_text())["summary"]
    assert summary["stop_request"] == {"until_stopped_s": 2.0, "until_saved_s": 3.5}


def test_a_full_disk_is_named_with_what_is_safe_and_what_to_do(small_disk, fill_disk):
    filler = fill_disk()
    with pytest.raises(
        CheckpointError, match=r"results.json cannot be written \(No space left .*checkpoint of step 7 is whole"
    ):
        write(small_disk / "results.json")
    assert [path.name for path in small_disk.iterdir()] == ["filler"]
    filler.unlink()
    write(small_disk / "results.json")
