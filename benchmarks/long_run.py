"""What a process holds during a long run: memory, descriptors, threads, mapped regions, and its files.

`launch local` runs the tiniest experiment, with saves, evaluations, TensorBoard, and logs that begin anew. From outside
each process is looked at with its children, and so is the launcher. What grows from the first fifth to the end is
fitted with a line over the steps. Read next: `launched.py`, `long_run_small.py`.
"""

import argparse
import bisect
import contextlib
import dataclasses
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.launched import Launched, last_step, launch, places
from benchmarks.report import Cell, Table

EXPERIMENT = f"{Path(__file__).with_name('long_run_small.py')}:small"
FLAGS = ("--batch-size", "4", "--keep-last", "3", "--keep-period", "None", "--eval.num-rows", "8", "--tensorboard")
SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)
# What a start still fills (caches, the allocator's pools) is not counted.
_SETTLED = 0.2
# Samples follow each other too closely to be independent: the line goes through medians of so many parts of the run.
NUM_PARTS = 10
# In a shorter run a thread or two that a pool still adds look like growth (seen in 5,000 steps).
LEAST_STEPS = 10_000
_T_975 = 2.306  # Student's quantile for ten points and two parameters
# What would be 10 % of what is held, in a million steps, is not called growth even if it is certain.
_LEAST_GROWTH = 0.1 / 1000
_TIMEOUT_S = 6 * 3600.0
COLUMNS = ("what", *(f"{share:.0%}" for share in SHARES), "per 1,000 steps", "95 % interval", "verdict")
_HELD = ("RSS MB", "PSS MB", "descriptors", "threads", "mapped regions")
# Those that fail: PSS also grows where another program with the same libraries ends, and files grow with the results.
_JUDGED = ("RSS MB", "descriptors", "threads", "mapped regions")
_MB = 1e6


@dataclasses.dataclass(frozen=True)
class Sample:
    """What was there when the run had come to this step."""

    step: int
    held: Mapping[str, float]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m benchmarks long_run", description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000, help="length of the run (%(default)s)")
    parser.add_argument("--processes", type=int, default=1, help="processes, one device each (%(default)s)")
    parser.add_argument("--workers", type=int, default=0, help="data workers per process (%(default)s)")
    parser.add_argument("--save-interval", type=int, default=500, help="steps; evaluations half as often (%(default)s)")
    parser.add_argument("--every-s", type=float, default=5.0, help="seconds between two looks (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="60 steps, to check that it runs")
    flags = parser.parse_args(argv)
    if flags.quick:
        flags.steps, flags.save_interval, flags.every_s = 60, 20, 0.05
    return flags


def main(argv: Sequence[str]) -> list[Table]:
    """Run the benchmark and return its table."""
    flags, began = parse(argv), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="benchmark-long-") as folder:
        samples = watch(Path(folder) / "run", flags)
    minutes = (time.monotonic() - began) / 60
    rows, grown = [], []
    for what in samples[-1].held:
        points = [(sample.step, sample.held[what]) for sample in samples if what in sample.held]
        row = row_of(what, points, flags.steps)
        rows.append(row)
        if row[-1] == "grows" and what.rpartition(", ")[2] in _JUDGED:
            grown.append(f"{what} grows by {row[-3]} per 1,000 steps")
    notes = [
        f"{flags.steps} steps in {minutes:.0f} minutes, a save every {flags.save_interval} steps, an evaluation every "
        f"{2 * flags.save_interval}, {len(samples)} looks. A process is counted with its children.",
        f"The line is fitted by least squares to the medians of {NUM_PARTS} equal parts of the run after its first "
        f"fifth. It grows if the whole interval is above zero and its middle is 10 % of what is held, or more, in a "
        "million steps. Files grow with the run's results, which is no failure.",
    ]
    title = f"Long run: small experiment, {flags.processes} processes, {flags.workers} data workers each"
    return [Table(title, COLUMNS, rows, notes, failure="; ".join(grown))]


def watch(base: Path, flags: argparse.Namespace) -> list[Sample]:
    """The samples of a run below `base`, from its first step to its last."""
    steps, saves = str(flags.steps), str(flags.save_interval)
    words = (EXPERIMENT, *FLAGS, "--num-train-steps", steps, "--save-interval", saves)
    words += ("--eval.interval", str(2 * flags.save_interval), "--num-workers", str(flags.workers))
    words += ("--log-interval", str(min(20, flags.save_interval // 4)))
    samples: list[Sample] = []
    output, directory = base.with_name("output"), base / "runs" / "small" / "x"
    launcher = ("--processes", flags.processes, "--devices-per-process", 1, "--log-dir", output)
    with Launched(launch("local", *launcher, "--", *words, *places(base)), {}) as run:
        deadline = time.monotonic() + _TIMEOUT_S
        while run.process.poll() is None and time.monotonic() < deadline:
            if step := last_step(directory):
                samples.append(Sample(step, {**held_by(run.process.pid), **files_of(directory, output)}))
            time.sleep(flags.every_s)
        code = run.end(timeout_s=60)
        if code or not samples:
            raise RuntimeError(f"the run ended with code {code}:\n{run.said()}")
    most = max(len(sample.held) for sample in samples)  # of a process that ends now, nothing may be left to see
    return [sample for sample in samples if len(sample.held) == most]


def held_by(launcher: int) -> dict[str, float]:
    """What the processes of a run and its launcher, of this number, hold."""
    children = _children()
    ranks = {_rank(pid): pid for pid in children.get(launcher, ())}
    processes = {f"process {rank}": _family(pid, children) for rank, pid in sorted(ranks.items()) if rank}
    processes["launcher"] = [launcher]
    held: dict[str, float] = {}
    for who, pids in processes.items():
        found = [of_one for pid in pids if (of_one := _of_process(pid)) is not None]
        held |= {f"{who}, {what}": sum(each) for what, each in zip(_HELD, zip(*found, strict=True), strict=False)}
    return held


def _of_process(pid: int) -> tuple[float, ...] | None:
    """RSS and PSS in MB, and the numbers of descriptors, threads and mapped regions; None if it ends now."""
    folder = Path(f"/proc/{pid}")
    try:
        rollup = dict(line.split(":", 1) for line in (folder / "smaps_rollup").read_text().splitlines()[1:])
        resident, proportional = (int(rollup[name].split()[0]) * 1024 / _MB for name in ("Rss", "Pss"))
        counts = [sum(1 for _ in (folder / name).iterdir()) for name in ("fd", "task")]
        return resident, proportional, *counts, (folder / "maps").read_bytes().count(b"\n")
    except (OSError, ValueError, KeyError):
        return None


def _rank(pid: int) -> str:
    """The rank of a training process; empty if it is none, or ends now."""
    with contextlib.suppress(OSError):
        for word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if word.startswith(b"RANK="):
                return word[5:].decode()
    return ""


def _children() -> dict[int, list[int]]:
    """The children of all processes."""
    found: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        found.setdefault(parent, []).append(int(folder.name))
    return found


def _family(pid: int, children: Mapping[int, Sequence[int]]) -> list[int]:
    return [pid, *(member for child in children.get(pid, ()) for member in _family(child, children))]


def files_of(directory: Path, output: Path) -> dict[str, float]:
    """The numbers of files of a run and of its launcher, and their megabytes by kind."""
    found = {"run directory, files": 0.0}
    kinds = {"logs": "logs", "tensorboard": "tensorboard", "metrics.jsonl": "metrics.jsonl", "time.jsonl": "time.jsonl"}
    sizes = dict.fromkeys((*kinds.values(), "checkpoints", "the rest"), 0.0)
    for path, size in _files(directory):
        found["run directory, files"] += 1
        top = path.relative_to(directory).parts[0]
        sizes[kinds.get(top, "checkpoints" if top.partition(".")[0].isdecimal() else "the rest")] += size / _MB
    found |= {f"{kind}, MB": size for kind, size in sizes.items()}
    return {**found, "launcher's logs, MB": sum(size for _, size in _files(output)) / _MB}


def _files(directory: Path) -> Iterator[tuple[Path, int]]:
    """The files below it and their sizes, without what is deleted meanwhile."""
    for folder, _, names in os.walk(directory):  # unlike `rglob`, it passes over folders that have gone
        for path in (Path(folder, name) for name in names):
            with contextlib.suppress(OSError):
                yield path, path.lstat().st_size


def row_of(what: str, points: Sequence[tuple[int, float]], num_steps: int) -> list[Cell]:
    """The row of one quantity, seen at these steps; the verdict is its last cell."""
    steps = [step for step, _ in points]
    cells: list[Cell] = [what]
    for share in SHARES:
        place = min(bisect.bisect_left(steps, share * num_steps), len(points) - 1)
        cells.append(statistics.median(value for _, value in points[max(place - 2, 0) : place + 3]))
    fitted = fit([(step, value) for step, value in points if step >= _SETTLED * num_steps])
    if fitted is None or num_steps < LEAST_STEPS:
        return [*cells, None, None, "too short"]
    slope, half, middle = fitted
    is_certain = abs(slope) > half and abs(slope) >= _LEAST_GROWTH * middle
    verdict = "flat" if not is_certain else "grows" if slope > 0 else "shrinks"
    return [*cells, f"{slope:+.3g}", f"{slope - half:+.3g} to {slope + half:+.3g}", verdict]


def fit(points: Sequence[tuple[int, float]]) -> tuple[float, float, float] | None:
    """The slope per 1,000 steps, half of its 95 % interval, and the middle value; None of too few points."""
    if len(points) < 2 * NUM_PARTS:
        return None
    bounds = [round(part * len(points) / NUM_PARTS) for part in range(NUM_PARTS + 1)]
    parts = [points[first:end] for first, end in itertools.pairwise(bounds)]
    x = [statistics.fmean(step / 1000 for step, _ in part) for part in parts]
    y = [statistics.median(value for _, value in part) for part in parts]
    slope, start = statistics.linear_regression(x, y)
    spread = sum((each - statistics.fmean(x)) ** 2 for each in x)
    rest = sum((value - start - slope * each) ** 2 for each, value in zip(x, y, strict=True))
    return slope, _T_975 * (rest / (NUM_PARTS - 2) / spread) ** 0.5, statistics.median(y)
