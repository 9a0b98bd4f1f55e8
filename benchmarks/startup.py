"""Seconds from the command to the first optimizer step, part by part, by the number of processes.

`launch local` starts the `debug` experiment, whose model is tiny, so the time is that of the program itself. A cold
start has an empty compilation cache, a warm one that of the cold start. Times are those at which process 0's lines
arrive. Read next: `launched.py`.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.launched import DEBUG, SMALL, Launched, launch, places
from benchmarks.report import Cell, Spread, Table

NUM_WARM = 3
TIMEOUT_S = 600.0
# The log line of process 0 that ends each part of a start.
PARTS = {
    "imports": " I compiled programs are kept in ",
    "meeting": " I starting jax: ",
    "jax": " I effective batch size ",
    "plan": " I parameters: ",
    "data": " I run directory: ",
    "state": r" I compiling the training step \(",
    "compile": " I compiled the training step in ",
    "first step": r" I step 1/",
}
COLUMNS = ("processes", "compilation cache", *(f"{part} s" for part in PARTS), "command to first step s")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m benchmarks startup", description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=(1, 2, 4), help="numbers of processes")
    parser.add_argument("--quick", action="store_true", help="a smaller experiment, one process, one warm start")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> list[Table]:
    """Run the benchmark and return its tables."""
    flags = parse(argv)
    rows = [row for count in ((1,) if flags.quick else flags.processes) for row in _rows(count, flags.quick)]
    notes = [
        "imports: until the program knows its experiment; meeting: until all processes are there and agree; plan: what "
        "fits, and the state's layout; data: self-test of the collectives, norm stats, run directory.",
    ]
    name = _experiment(flags.quick).rpartition(":")[2]
    return [Table(f"Start-up: {name} experiment, one CPU device per process", COLUMNS, rows, notes)]


def _experiment(quick: bool) -> str:
    return SMALL if quick else DEBUG


def _rows(num_processes: int, quick: bool) -> list[list[Cell]]:
    """A cold start, and warm ones."""
    with tempfile.TemporaryDirectory(prefix="benchmark-startup-") as folder:
        name = _experiment(quick)
        cold = [_start(Path(folder), name, num_processes, 0)]
        warm = [_start(Path(folder), name, num_processes, number) for number in range(1, 2 if quick else NUM_WARM + 1)]
    return [
        [num_processes, name, *(Spread(times) for times in zip(*starts, strict=True))]
        for name, starts in (("cold", cold), ("warm", warm))
    ]


def _start(folder: Path, experiment: str, num_processes: int, number: int) -> list[float]:
    """The seconds of each part of one start, and the total."""
    words = (experiment, "--batch-size", "8", "--no-tensorboard")
    words += ("--num-train-steps", "1000", "--save-interval", "1000")
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")}
    seconds, place = [], -1
    launcher = ("--processes", num_processes, "--devices-per-process", 1, "--log-dir", folder / f"{number}-output")
    command = launch("local", *launcher, "--", *words, *places(folder / str(number)))
    with Launched(command, cache) as run:
        last = run.started
        for part, pattern in PARTS.items():
            found = run.await_place(pattern, TIMEOUT_S, place + 1)
            if found is None:
                raise RuntimeError(f"the start with {num_processes} processes did not come past {part}:\n{run.said()}")
            place = found
            seconds.append(run.lines[place].at - last)
            last = run.lines[place].at
        return [*seconds, last - run.started]
