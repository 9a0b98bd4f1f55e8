"""RL of robots: control steps per CPU second, where the time goes, overlap, and memory over many iterations.

Runs of `rl_watched.py`, which begin with random weights, in processes of their own. Read next:
`openpi_train/rl/robot_actor.py`, `openpi_train/envs/double_buffering.py`.
"""

import argparse
import dataclasses
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, Spread, Table
from benchmarks.rl_watched import NOTES, metaworld, tabletop, tiny

# Iterations of each run, of which the first ones compile and fill caches.
RUNS: Mapping[str, tuple[int, int]] = {"tiny": (200, 40), "tabletop": (6, 2), "metaworld": (4, 1)}
_EXPERIMENTS = {"tiny": tiny, "tabletop": tabletop, "metaworld": metaworld}
# Resident memory may grow by this from the second quarter of the tiny run to its last: what allocators keep varies.
MOST_GROWTH_MB = 5.0
# The share of a collection in which policy and simulators should both work, where they take about the same time.
LEAST_OVERLAP = 0.6
SPEED = ("run", "episodes", "control steps/CPU s", "policy", "environment", "scoring, learning", "overlap", "both")
MEMORY = ("run", "iterations", "resident MB, then", "at the end", "arrays, then", "arrays at the end", "growth MB")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m benchmarks rl_speed", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=RUNS, metavar="NAME", help=f"of {', '.join(RUNS)}")
    parser.add_argument("--dataset", default="data/metaworld_reach.zarr", help="for metaworld; made if it is missing")
    parser.add_argument("--quick", action="store_true", help="run nothing: only check that the runs are understood")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> list[Table]:
    """Run the benchmark and return its tables."""
    flags, speed, memory, notes, failures = parse(argv), [], [], [], []
    with tempfile.TemporaryDirectory() as directory:
        for name in flags.only or RUNS:
            dataclasses.replace(_EXPERIMENTS[name], exp_name="x").check(1)
            if flags.quick:
                notes.append(f"{name}: not run.")
                continue
            if name == "metaworld" and importlib.util.find_spec("metaworld") is None:
                notes.append("metaworld: not measured, without it (pip install 'openpi_train[sim]').")
                continue
            lines, logged = _run(name, Path(directory), flags.dataset)
            speed.append(speed_row(name, lines, logged, skipped=RUNS[name][1]))
            if name == "tiny":
                memory.append(memory_row(name, lines))
                failures += grown(memory[-1])
            if name == "metaworld" and (overlap := speed[-1][-2].median) < LEAST_OVERLAP:
                failures.append(f"{overlap:.0%} of a collection are overlapped; wanted: {LEAST_OVERLAP:.0%}")
    notes.append("Control steps until success, or the end; CPU seconds of collections, with those of workers.")
    notes.append("Shares are of the seconds of an iteration. Both: the most that the overlap can be.")
    return [
        Table("RL: control steps and where the time goes", SPEED, speed, notes, failure="; ".join(failures)),
        Table("RL: memory", MEMORY, memory, ["Medians of the run's second and last quarter."]),
    ]


def speed_row(name: str, lines: Sequence[dict[str, Any]], logged: Sequence[dict[str, Any]], skipped: int) -> list[Any]:
    """What iterations after the skipped ones took: `lines` are notes, `logged` those of the run's log with metrics."""
    begins, ends = (lines[place::2] for place in (0, 1))
    rates, shares, overlaps, most = [], [], [], []
    for number in range(skipped, len(begins) - 1):
        begin, end, line = begins[number], ends[number], logged[number]
        whole, acting = begins[number + 1]["wall_s"] - begin["wall_s"], end["wall_s"] - begin["wall_s"]
        steps = line["rl/rollouts"] * line["rl/control_steps"]
        rates.append(steps / (end["cpu_s"] - begin["cpu_s"]))
        policy, environment = line["time/policy_s"], line["time/environment_s"]
        shares.append((policy / whole, environment / whole, (whole - acting) / whole))
        overlaps.append(line.get("rl/overlap", 0.0))
        most.append(min(policy, environment) / max(policy, environment))
    parts = [Spread(one) for one in zip(*shares, strict=True)]
    return [
        name,
        logged[0]["rl/rollouts"],
        Spread(tuple(rates)),
        *parts,
        Spread(tuple(overlaps)),
        Spread(tuple(most)),
    ]


def memory_row(name: str, lines: Sequence[dict[str, Any]]) -> list[Any]:
    """Resident memory and arrays at the beginnings of iterations."""
    begins = lines[::2]
    quarter = len(begins) // 4
    parts = begins[quarter : 2 * quarter], begins[-quarter:]
    resident, arrays = (
        [statistics.median(line[what] for line in part) for part in parts] for what in ("resident_mb", "arrays")
    )
    return [name, len(begins), *resident, *arrays, resident[1] - resident[0]]


def grown(row: Sequence[Any]) -> list[str]:
    """What has grown, as sentences."""
    name, _, _, _, then, later, growth = row
    said = []
    if growth > MOST_GROWTH_MB:
        said.append(f"{name}: resident memory grows by {growth:.1f} MB; wanted: at most {MOST_GROWTH_MB:g}")
    if later > then:
        said.append(f"{name}: {later - then:g} more arrays are alive at the end")
    return said


def _run(name: str, directory: Path, dataset: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The notes of the run, and the lines of its log that have metrics of an iteration, one of each."""
    experiment, (count, _) = _EXPERIMENTS[name], RUNS[name]
    rl: Any = experiment.rl
    per_iteration = rl.steps_per_iteration(experiment.batch_size)
    steps, words = str((count + 1) * per_iteration), []
    if name == "metaworld":
        words = ["--dataset", str(Path(dataset).absolute())]
        if not Path(dataset).exists():
            _command("data", "collect", "metaworld", "--tasks", "reach", "--out", words[1])
    place = ("--exp-name", "x", "--checkpoint-base-dir", str(directory), "--assets-base-dir", str(directory / "assets"))
    many = ("--num-train-steps", steps, "--save-interval", steps, "--log-interval", str(per_iteration))
    # A file of its own: the folder of an experiment's file is where Python looks first, and here is a `metaworld.py`.
    file = directory / "watched.py"
    file.write_text(f"from benchmarks.rl_watched import {name}\n")
    _command(f"{file}:{name}", *place, *many, *words)
    run = directory / name / "x"
    lines = [json.loads(line) for line in (run / NOTES).read_text().splitlines()]
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return lines, [line for line in logged if "rl/iteration" in line]


def _command(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "openpi_train", *words], cwd=ROOT, check=True)
