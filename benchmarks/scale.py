"""What many processes cost a run before and beside its steps: meeting, agreeing, saving, restoring, losing one.

All run on this machine, each with one CPU device, by the product's own entries, without a model and without steps.
Read next: `scale_process.py`, which is one process.
"""

import argparse
import collections
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, Cell, Table
from openpi_train.checkpoints.layout import leaves_by_item, size_bytes
from openpi_train.cli import parse_experiment
from openpi_train.launch.processes import free_port
from openpi_train.parallel.mesh import planned_mesh
from openpi_train.parallel.strategy import Plan
from openpi_train.runtime.device_limits import host_available_bytes
from openpi_train.runtime.exits import PEER_LOST
from openpi_train.training.prepare import whole_layout

FULL, QUICK = "pi0_bridge_traj", "debug"
PROCESSES, QUICK_PROCESSES = (64, 256, 1024), (8,)
# Memory that a process and its carrier do not share with the others: with arrays, Orbax and tensorstore have the larger
# part.
_MB, _MB_WITH_ARRAYS = 27, 60
COLUMNS = ("processes", "stage", "wall s", "CPU s of process 0", "CPU s of another", "another / with fewest processes")
HELD = ("processes", "open files of process 0", "its threads", "open files of another", "its threads ", "its own MB")
HELD += ("manifest MB", "last one ended s after the kill", "exit codes")
NOTES: tuple[str, ...] = (
    "CPU seconds are of all threads of a process; another: the median of all but process 0. Wall seconds are from the",
    "first one's begin to the last one's end: here all share the machine's cores, in a run each host has its own.",
    "The files of `checksums` and `check` have the size of the state (or --size of it); they are holes, read as zeros.",
    "Those of `one element a leaf` are Orbax's, of as many arrays and pieces as the state has, each of one element.",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """What a run of some processes has left."""

    costs: Mapping[str, tuple[float, float, float]]
    """Wall seconds, and CPU seconds of process 0 and of the others' median, by stage."""
    held: Sequence[Cell]
    failure: str


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m benchmarks scale", description=__doc__)
    parser.add_argument("--processes", nargs="+", type=int, metavar="N", help="rows to measure (64 256 1024)")
    parser.add_argument("--directory", type=Path, help="an existing folder for the checkpoints (default: /tmp)")
    parser.add_argument(
        "--size", type=float, default=1.0, metavar="SHARE", help="of the state's bytes, to be summed up"
    )
    parser.add_argument("--quick", action="store_true", help="8 processes, and the state of the debug experiment")
    flags = parser.parse_args(argv)
    flags.processes = sorted(flags.processes or (QUICK_PROCESSES if flags.quick else PROCESSES))
    return flags


def main(argv: Sequence[str]) -> list[Table]:
    """Run the benchmark and return its tables."""
    flags = parse(argv)
    experiment = parse_experiment(QUICK if flags.quick else FULL, ["--exp-name", "benchmark"])
    shapes = whole_layout(experiment, Plan(mesh=planned_mesh(1, 1), strategy="replicated")).shapes
    items = leaves_by_item(shapes, experiment.model.param_rules.public_name)
    state = {
        "bytes": {item: round(flags.size * size_bytes({item: leaves})) for item, leaves in items.items()},
        "leaves": {item: len(leaves) for item, leaves in items.items()},
    }
    found, notes = {}, [*NOTES]
    for count in flags.processes:
        plan = {**state, "processes": count, "ports": [free_port(), free_port()], "arrays": True}
        if count * _MB_WITH_ARRAYS * 2**20 > host_available_bytes():
            plan["arrays"] = False
            notes.append(
                f"{count} processes that write arrays would need {count * _MB_WITH_ARRAYS / 1024:.0f} GB here."
            )
        if count * _MB * 2**20 > host_available_bytes():
            notes.append(f"{count} processes need {count * _MB / 1024:.0f} GB: left out.")
            continue
        with tempfile.TemporaryDirectory(dir=flags.directory, prefix="benchmark-scale-") as folder:
            found[count] = measure(plan, Path(folder))
        for row in _rows(found):  # a thousand processes take long, and may not come to an end here
            print(*row, sep="\t", file=sys.stderr)
    size, number = (sum(state[name].values()) for name in ("bytes", "leaves"))
    what = f"the {number} leaves of {experiment.name}, {size / 1e9:.3g} GB to sum up"
    failure = "; ".join(one.failure for one in found.values() if one.failure)
    return [
        Table(f"Many processes, {what}", COLUMNS, list(_rows(found)), notes, failure),
        Table("Many processes: what they hold, and their end", HELD, [one.held for one in found.values()]),
    ]


def _rows(found: Mapping[int, Found]) -> Iterable[Sequence[Cell]]:
    for count, one in found.items():
        for stage, (wall_s, first_s, cpu_s) in one.costs.items():
            yield [count, stage, wall_s, first_s, cpu_s, cpu_s / found[min(found)].costs[stage][2]]


def measure(plan: Mapping[str, Any], folder: Path) -> Found:
    """Run both lives of a run of so many processes, with its files in an empty folder."""
    (folder / "plan.json").write_text(json.dumps(plan))
    words = [sys.executable, "-m", "benchmarks.scale_process", str(folder / "plan.json"), str(folder)]
    # Else each thread takes memory of its own from the system, and a process has dozens of them.
    subprocess.run(words, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu", "MALLOC_ARENA_MAX": "1"}, check=True)
    ends = json.loads((folder / "ends.json").read_text())
    first, again = (_told(folder / life, plan["processes"]) for life in ("first_life", "second_life"))
    codes = collections.Counter(code for code, _ in ends["first_life"])
    failure = ""
    if codes != {-9: 1, PEER_LOST: plan["processes"] - 1} or any(code for code, _ in ends["second_life"]):
        odd = [index for index, (code, _) in enumerate(ends["first_life"]) if code not in (-9, PEER_LOST)]
        log = (folder / "first_life" / f"{(odd or [0])[0]}.log").read_text(errors="replace")[-4000:]
        failure = f"{plan['processes']} processes ended with {dict(codes)}, or did not start again: {log}"
    if not first or not again:
        return Found(costs={}, held=[plan["processes"], *[None] * (len(HELD) - 1)], failure=failure)
    costs = {stage: _cost([one["costs"][stage] for one in first]) for stage in first[0]["costs"]}
    costs |= {f"again, {stage}": _cost([one["costs"][stage] for one in again]) for stage in again[0]["costs"]}
    killed = float((folder / "first_life/killed").read_text())
    held = [plan["processes"], *first[0]["open"], *first[1]["open"]]
    held += [statistics.median(one["memory"] for one in first[1:])]
    held += [(folder / "run/1/manifest.json").stat().st_size / 1e6]
    held += [max(time for code, time in ends["first_life"]) - killed]
    held += [", ".join(f"{number} x {code}" for code, number in sorted(codes.items()))]
    return Found(costs=costs, held=held, failure=failure)


def _told(folder: Path, count: int) -> list[dict[str, Any]]:
    """What each process has told; empty unless all have."""
    paths = [folder / f"{index}.json" for index in range(count)]
    return [json.loads(path.read_text()) for path in paths] if all(path.exists() for path in paths) else []


def _cost(told: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    begun, ended, used = zip(*told, strict=True)
    return max(ended) - min(begun), used[0], statistics.median(used[1:])
