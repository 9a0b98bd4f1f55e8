"""The success rate of a policy during training on demonstrations of the embedded tabletop.

`tabletop_dp.py` and `demo.py` define the policies. No demonstration begins in the states used for evaluation, the
environment judges success, and step 0 is the untrained network.
"""

import argparse
import contextlib
import dataclasses
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, Cell, Table, number
from openpi_train.cli import parse_experiment
from openpi_train.data.make.embedded import prepare

COLUMNS = ("step", "held-out loss", "held-out loss, averaged weights", "95 % interval", "share")
UNTRAINED_BELOW = 0.1
# Added by --quick, which only checks that everything runs.
QUICK = ("--num-train-steps", "2", "--save-interval", "2", "--batch-size", "4", "--lr-schedule.warmup-steps", "1")
QUICK += ("--eval.interval", "1", "--eval.num-rows", "4", "--eval.num-sample-steps", "1")
QUICK += ("--eval.closed-loop.interval", "1", "--eval.closed-loop.episodes-per-task", "2")
QUICK += ("--eval.closed-loop.episodes-per-device", "4", "--eval.closed-loop.max-steps", "8")
QUICK += ("--eval.closed-loop.num-videos", "0")
# With few episodes, none might be held out.
QUICK += ("--data.validation-fraction", "0.5")
_QUICK_DATA = {"episodes_per_task": 4, "val_episodes_per_task": 1, "image_size": 32}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """The experiment, the tasks and number of demonstrations, and the required success rate."""

    experiment: str
    dataset: str
    tasks: tuple[str, ...]
    episodes_per_task: int
    target: float
    quick_flags: tuple[str, ...] = ()


def parse(
    program: str, description: str | None, study: Study, argv: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line; also returns the flags of the experiment."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog=f"python -m benchmarks {program}",
        description=description,
        epilog=f"Flags of {study.experiment} may follow.",
    )
    parser.add_argument("--out", type=Path, help="folder in which to keep the run (default: it is deleted)")
    parser.add_argument("--quick", action="store_true", help="two steps and episodes, to check that it runs")
    flags, rest = parser.parse_known_args(argv)
    rest = [*QUICK, *study.quick_flags, *rest] if flags.quick else rest
    parse_experiment(study.experiment, ["--exp-name", "benchmark", *rest])
    return flags, rest


@contextlib.contextmanager
def folder(flags: argparse.Namespace) -> Iterator[Path]:
    """The output folder: `--out`, or a temporary one that is deleted at the end."""
    with tempfile.TemporaryDirectory() as temporary:
        yield (flags.out or Path(temporary)).absolute()


def run_directory(study: Study, out: Path) -> Path:
    """The run directory of `measure`."""
    return out / "runs" / study.experiment / "benchmark"


def measure(title: str, study: Study, flags: argparse.Namespace, rest: Sequence[str], out: Path) -> Table:
    """Write the demonstrations, train below `out`, and return a table of all evaluations."""
    made = prepare(
        out / "datasets" if flags.quick else None,
        name=study.dataset,
        tasks=study.tasks,
        **(_QUICK_DATA if flags.quick else {"episodes_per_task": study.episodes_per_task}),
    )
    words = ["--exp-name", "benchmark", "--checkpoint-base-dir", f"{out}/runs", "--assets-base-dir", f"{out}/assets"]
    words += ["--dataset", str(made.dataset.parent), "--data.tokenizer", str(made.tokenizer), "--overwrite", *rest]
    started, cpu_s = time.monotonic(), _children_s()
    subprocess.run([sys.executable, "-m", "openpi_train", study.experiment, *words], cwd=ROOT, check=True)
    wall_s, cpu_s = time.monotonic() - started, _children_s() - cpu_s
    found = evaluations(run_directory(study, out))
    by_task = [f"{name} {found[-1][f'success/{name}']:.0%}" for name in study.tasks]
    notes = [
        f"{sum(made.num_episodes.values())} demonstrations, of which {made.num_episodes['train']} for training, "
        f"{made.num_steps['train']} control steps. Training, start and evaluations included, took {number(cpu_s)} s of "
        f"CPU in {number(wall_s)} s. At the end by task: {', '.join(by_task)}."
    ]
    return Table(title, COLUMNS, [_row(line) for line in found], notes, "" if flags.quick else failure(study, found))


def evaluations(directory: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics that report episodes in the environment."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "success/all" in line]


def failure(study: Study, found: Sequence[Mapping[str, Any]]) -> str:
    """What is wrong with these evaluations; the first one is of the untrained network."""
    first, last = found[0]["success/all"], found[-1]["success/all"]
    if last < study.target:
        return f"{study.experiment} succeeds in {last:.0%} of the episodes, {study.target:.0%} are asked for"
    if first >= UNTRAINED_BELOW:
        return f"{study.experiment} succeeds in {first:.0%} of the episodes untrained: they show nothing"
    return ""


def _row(line: Mapping[str, Any]) -> list[Cell]:
    low, high = line["success/all_low"], line["success/all_high"]
    shares = f"{low:.0%} to {high:.0%}", line["success/all"]
    return [line["step"], line.get("val/loss"), line.get("val/loss_ema"), *shares]


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
