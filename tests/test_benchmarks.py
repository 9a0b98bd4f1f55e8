"""Every benchmark runs and prints its table, and every command of its docs is understood. No speed is asserted."""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.__main__ import BENCHMARKS

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> tuple[str, dict]:
    """What `python -m benchmarks --quick` prints, and what it writes."""
    file = tmp_path_factory.mktemp("benchmarks") / "all.json"
    done = run("--quick", "--json", str(file))
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(file.read_text())


def run(*words: str) -> subprocess.CompletedProcess[str]:
    # Compiling is most of the time, and the speed of what is compiled does not matter here.
    environ = {**os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    program = [sys.executable, "-m", "benchmarks", *words]
    return subprocess.run(program, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=400)


def rows(quick: tuple[str, dict], title: str) -> list[dict]:
    (table,) = [table for table in quick[1]["tables"] if table["title"].startswith(title)]
    assert f"### {table['title']}\n" in quick[0]
    return table["rows"]


@pytest.mark.slow
def test_step_time_compares_three_two_and_one_cameras_at_equal_loss(quick):
    found = rows(quick, "Step time")
    assert [row["cameras"] for row in found] == [3, 2, 1]
    for row in found:
        assert len(row["time padded / present"]) == len(row["step ms"]) == len(row["padded step ms"]) == 2
        difference, loss = map(float, row["loss difference"].split(" of "))
        # Float32, and sums over another number of tokens.
        assert difference < 1e-5 * loss
    ratios = [row["FLOPs padded / present"] for row in found]
    assert ratios == sorted(ratios) and ratios[0] == 1
    assert found[2]["program MiB"] < found[0]["program MiB"]


@pytest.mark.slow
def test_feed_compares_numbers_of_workers(quick):
    found = rows(quick, "Feed")
    assert [row["workers"] for row in found] == [0, 1, 2]
    assert found[0]["samples/s vs first row"] == [1.0]
    assert all(row["samples/s"][0] > 0 and row["time to first batch s"][0] > 0 for row in found)


@pytest.mark.slow
def test_checkpoint_tells_the_stall_of_both_kinds_of_save(quick):
    found = rows(quick, "Checkpoint")
    assert [(row["state"], row["save"]) for row in found] == [
        (state, save) for state in ("tiny", "large") for save in ("synchronous", "asynchronous")
    ]
    assert found[2]["MB"] > 2 * found[0]["MB"]
    for row in found:
        (stall,), (call,), (extra,) = (row[name] for name in ("stall ms", "save call ms", "all following extra ms"))
        assert stall == pytest.approx(call + extra)
        share = 100 * stall / (100 * row["step ms"][0])
        assert row["stall / 100 steps"] == f"{report.number(share)} %"


@pytest.mark.slow
def test_tabletop_compares_numbers_of_scenes(quick):
    found = rows(quick, "Tabletop")
    assert [row["scenes"] for row in found] == [1, 2]


@pytest.mark.slow
def test_results_say_when_on_what_and_with_which_code_they_were_measured(quick):
    facts = quick[1]["provenance"]
    assert set(facts) == {"date", "devices", "cpu", "load", "versions", "commit", "command"}
    assert facts["command"].startswith("python -m benchmarks --quick --json ")
    assert all(f"{name}: {value}" in quick[0] for name, value in facts.items())


def test_a_table_shows_medians_with_their_spread():
    one, two = report.Spread((3.0, 1.0, 2.0)), report.Spread((6.0, 4.0, 2.0))
    assert str(one) == "2 (1 to 3)"
    # Pair by pair: the median of 2, 4 and 1, not the ratio of the medians.
    assert two.over(one).samples == (2.0, 4.0, 1.0)
    table = report.Table("Title", ("name", "value"), [["a", one], ["b", None]], ["A note."])
    lines = ["### Title", "", "| name | value      |", "|------|------------|", "| a    | 2 (1 to 3) |"]
    assert table.markdown() == "\n".join([*lines, "| b    | -          |", "", "A note.", ""])
    assert table.as_json()["rows"] == [{"name": "a", "value": [3.0, 1.0, 2.0]}, {"name": "b", "value": None}]
    assert [report.number(value) for value in (0.01234, 1.5, 123.4, 1234567)] == ["0.0123", "1.5", "123", "1,234,567"]


def test_documented_commands_are_understood():
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    commands = re.findall(r"^    python -m benchmarks (.*)$", text, re.MULTILINE)
    assert len(commands) >= 6
    for command in commands:
        name, *flags = shlex.split(command, comments=True)
        if name in BENCHMARKS:
            flags = flags[: flags.index("--json")] if "--json" in flags else flags
            importlib.import_module(f"benchmarks.{name}").parse(flags)
        else:
            assert name == "--quick" and not flags
    assert all(f"| `{name}` |" in text for name in BENCHMARKS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["step_times"], "no benchmark step_times; there are step_time, feed"),
        (["--model", "medium"], "need exactly one benchmark's name"),
        (["feed", "--json"], "--json needs the name of a file"),
    ],
)
def test_a_wrong_command_line_says_what_is_allowed(words, message):
    done = run(*words)
    assert done.returncode == 2 and message in done.stderr
