"""Ten faults during a run on two hosts in namespaces, each with its verdict, and the bits of an undisturbed run."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from debian import install

from benchmarks.drill import kinds, netns
from benchmarks.drill.experiments import EXPERIMENTS

ROOT = Path(__file__).resolve().parent.parent
NAMES = list(kinds.KINDS)
# Those that cost the least: the whole list is for `python -m benchmarks fault_drill`.
SHORT = ("host: kill -9 of a process", "program: segmentation fault", "GPU: uncorrectable memory error")
SHORT += ("network: away for seconds", "disk: errors of a save", "disk: slow", "disk: damaged checkpoint")
SHORT += ("disk: torn record", "stop: SIGTERM to a process")


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_run_survives_ten_faults_without_a_person_and_ends_with_the_bits_of_an_undisturbed_one(tmp_path):
    for program in ("ip", "sshd"):
        install(program)
    if reason := netns.why_not():
        pytest.skip(reason)
    words = ("--faults", "10", "--hosts", "2", "--small", "--seed", "1", "--json", tmp_path / "found.json", "--kinds")
    command = [sys.executable, "-m", "benchmarks", "fault_drill", *map(str, words), *SHORT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-20_000:]
    (table,) = json.loads((tmp_path / "found.json").read_text())["tables"]
    last = table["rows"][-1]
    assert (last["fault"], last["number"], last["survived"]) == ("all", 10, 10)
    assert "every array of the last checkpoint and the metrics of every step the same bits" in table["notes"][0]


def test_kinds_come_by_their_weights_and_some_while_another_is_mended():
    faults = kinds.sequence(200, NAMES, 0.2, random.Random(7))
    assert sum(map(len, faults)) == 200 and sum(len(group) == 2 for group in faults) == 40
    drawn = [name for group in faults for name in group]
    assert 0.4 < sum(name.startswith("GPU") for name in drawn) / 200 < 0.6
    assert set(drawn) == set(NAMES)
    assert all(kinds.KINDS[group[0]].codes and kinds.KINDS[group[1]].starting for group in faults if len(group) == 2)
    assert faults == kinds.sequence(200, NAMES, 0.2, random.Random(7))


def test_a_window_that_an_experiment_does_not_have_is_not_drawn():
    kill = kinds.KINDS["host: kill -9 of a process"]
    found = {name: kinds.possible_windows(kill, drilled, is_next=False) for name, drilled in EXPERIMENTS.items()}
    assert [("local save" in windows, "acting" in windows) for windows in found.values()] == [
        (False, False),
        (True, False),
        (False, True),
    ]
