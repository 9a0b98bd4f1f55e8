"""The table of all runs below a folder, what differs between two of them, and the documented line that reads one."""

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from openpi_train_configs.debug import debug

from openpi_train import cli
from openpi_train.fields import as_json
from openpi_train.runtime import locks

DOCS = Path(__file__).resolve().parents[2] / "docs"
STEPS = 40


def write_run(base, name, lines, *, results=None, checkpoints=(), minutes_ago=0.0, **changes):
    """A run's directory as training leaves it, whose last line was written so many minutes ago."""
    experiment = dataclasses.replace(debug, exp_name=name, num_train_steps=STEPS, **changes)
    path = base / "debug" / name
    path.mkdir(parents=True)
    (path / "experiment.json").write_text(json.dumps(as_json(experiment)))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn')
    start = {"versions": {"jax": "0.1"}, "git": {"commit": name}, "devices": {"count": 8}, "process_count": 1}
    (path / "environment.json").write_text(json.dumps({"starts": [{"versions": {"jax": "0.0"}}, start]}))
    if results is not None:
        (path / "results.json").write_text(json.dumps({"summary": results}))
    for step in checkpoints:
        (path / str(step)).mkdir()
        (path / str(step) / "manifest.json").write_text("{}")
    at = time.time() - 60 * minutes_ago
    os.utime(path / "metrics.jsonl", (at, at))
    return path


def lines_of(last, loss=0.5, speed=80.0, **more):
    """Lines up to a step: three of training, two of evaluations, the first of which was better."""
    return [
        {"step": 0, "val/loss": "NaN"},
        {"step": last - 2, "loss": 2.0, "samples_per_s": 1.0},
        {"step": last - 2, "val/loss": 0.9, "val/loss_ema": 0.25},
        {"step": last, "loss": loss, "samples_per_s": speed, **more},
        {"step": last, "val/loss": 0.1, "val/loss_ema": 0.75},
    ]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with a run in each state, and other folders."""
    base = tmp_path_factory.mktemp("runs")
    ended = write_run(base, "ended", lines_of(40), results={"step": 40}, checkpoints=(20, 40), minutes_ago=90)
    spent = {"at": 4.0, "step": 40, "seconds": {"training": 3.0, "lost": 1.0}, "longest_s": {}}
    (ended / "time.jsonl").write_text(json.dumps(spent) + "\n")
    write_run(base, "stopped", lines_of(12), results={"step": 12, "stop_request": {"until_saved_s": 1}}, batch_size=16)
    write_run(base, "killed", lines_of(14, loss="NaN"), results={"step": 12, "stop_request": {"until_saved_s": 1}})
    write_run(base, "begun", [])
    going = write_run(base, "going", lines_of(8, **{"success/all": 0.75}), minutes_ago=1)
    (base / "ended").mkdir()
    (base / "debug" / "going" / "8").mkdir()
    (base / "debug" / "going" / "8" / "experiment.json").write_text("{}")  # a part of a run is none
    holder = locks.take(going / ".lock", "the test")
    yield base
    os.close(holder)


def said(capsys, *words) -> str:
    assert cli.run(["runs", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_the_table_has_every_run_with_its_state_the_latest_last(base, capsys):
    header, *rows = [re.split(r"  +", line.strip()) for line in said(capsys, base).splitlines()]
    assert header == ["run", "state", "step", "loss", "best", "samples/s", "goodput", "success", "written"]
    table = {row[0]: row[1:] for row in rows}
    assert rows[0][0] == "debug/ended" and set(table) == {f"debug/{name}" for name in STATES}
    assert {name: table[f"debug/{name}"][0] for name in STATES} == STATES
    assert table["debug/ended"] == ["ended", "40/40", "0.5000", "0.2500 at 38", "80.0", "75%", "-", "1h30m ago"]
    assert table["debug/going"][1:-1] == ["8/40", "0.5000", "0.2500 at 6", "80.0", "-", "75%"]
    assert table["debug/killed"][2] == "nan"
    assert table["debug/begun"][1:-1] == ["0/40", "-", "-", "-", "-", "-"]


STATES = {
    "ended": "ended",
    "stopped": "stopped",
    "killed": "interrupted",
    "begun": "interrupted",
    "going": "running",
}


def test_as_json_the_numbers_are_numbers(base, capsys):
    found = {one["run"]: one for one in json.loads(said(capsys, base, "--json"))}
    ended = found["debug/ended"]
    assert ended.pop("age_s") == pytest.approx(5400, abs=60)
    assert ended == {
        "run": "debug/ended",
        "path": str(base / "debug" / "ended"),
        "state": "ended",
        "step": 40,
        "num_train_steps": 40,
        "loss": 0.5,
        "best": {"step": 38, "value": 0.25},
        "samples_per_s": 80.0,
        "goodput": 0.75,
        "success": None,
        "reward": None,
        "checkpoints": [20, 40],
    }
    assert found["debug/killed"]["loss"] == "NaN"
    assert found["debug/going"]["success"] == 0.75


def test_the_difference_of_two_runs_is_that_of_their_settings_and_of_what_ran_them(base, capsys):
    assert json.loads(said(capsys, base, "--json", "--diff", "debug/ended", "stopped")) == {
        "settings": {"batch_size": [8, 16]},
        "environment": {"git.commit": ["ended", "stopped"]},
    }
    table = [
        re.split(r"  +", line)
        for line in said(capsys, base, "--diff", "ended", base / "debug" / "stopped").splitlines()
    ]
    assert table == [
        ["setting", "debug/ended", "debug/stopped"],
        ["--batch-size", "8", "16"],
        ["environment"],
        ["git.commit", "ended", "stopped"],
    ]
    assert said(capsys, base, "--diff", "ended", "ended") == "debug/ended and debug/ended do not differ\n"


def test_what_is_not_there_is_named_with_what_is(base, capsys, tmp_path):
    assert cli.run(["runs", str(base), "--diff", "ended", "stoped"]) == 2
    assert "there is no run stoped below" in (error := capsys.readouterr().err) and "debug/stopped" in error
    assert cli.run(["runs", str(tmp_path / "none")]) == 2
    assert "none is no folder" in capsys.readouterr().err
    assert said(capsys, tmp_path) == f"there are no runs below {tmp_path}\n"


def test_the_documented_line_prints_a_metric_by_step(base):
    page = (DOCS / "reference" / "metrics.md").read_text().replace("\\\n", "")
    (line,) = re.findall(r"^    (python -c .*)$", page, re.MULTILINE)
    program = shlex.split(line)[2].replace(
        "checkpoints/pi0_bridge_traj_tiny/first_run", str(base / "debug" / "stopped")
    )
    (base / "debug" / "stopped" / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines_of(12)))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["10", "2.0", "12", "0.5"]


def test_the_lowest_loss_before_training_is_no_checkpoint(tmp_path, capsys):
    write_run(tmp_path, "worse", [{"step": 0, "val/loss": 0.5, "loss": 0.5}, {"step": 9, "val/loss": 0.7, "loss": 0.5}])
    assert "0.5000 at 0 (untrained)" in said(capsys, tmp_path)
