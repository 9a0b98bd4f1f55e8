"""Closed loops while training: the same episodes end the same way on any number of processes and devices."""

import json
from pathlib import Path

import pytest
from command import train

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
RUNS = Path(__file__).with_name("acting_runs.py")


def outcomes(base, step):
    return json.loads((base / "runs" / "drift" / "x" / "eval" / str(step) / "closed_loop.json").read_text())


def test_processes_and_devices_change_no_episode_and_both_ends_are_evaluated(tmp_path):
    flags = (f"{RUNS}:drift", "--batch-size", "6")
    done = train(tmp_path / "one", *flags)
    train(tmp_path / "three", *flags, processes=3)
    first, last = (outcomes(tmp_path / "one", step) for step in (0, 2))
    # The untrained policy is the same to the bit, on one device or on three; the trained one but for rounding.
    assert outcomes(tmp_path / "three", 0) == first
    assert [episode["task"] for episode in last["episodes"]] == ["near", "far"] * 5
    assert len({episode["steps"] for episode in first["episodes"]}) > 2
    assert first["overall"]["successes"] > 0
    assert outcomes(tmp_path / "three", 2)["overall"]["trials"] == 10
    lines = (tmp_path / "one" / "runs" / "drift" / "x" / "metrics.jsonl").read_text().splitlines()
    logged = [line for line in map(json.loads, lines) if "success/all" in line]
    assert [line["step"] for line in logged] == [0, 2]
    assert logged[1]["success/near"] == last["tasks"]["near"]["rate"] and "val/loss" in logged[1]
    assert "success in the environment" in done.stderr + done.stdout
