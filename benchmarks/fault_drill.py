"""Random faults during one run over hosts in namespaces, under `launch ssh --max-restarts`.

After each fault the run must train again without a person, soon, from its newest checkpoint; the launcher must name the
cause and the host; nothing may be left over, and nothing may grow. At the end the run is compared with an undisturbed
one: every array of the last checkpoint and the metrics of every step must be bit-identical. The first thing that is not
so ends the drill; the same seed repeats it, with `--first` from there on. Needs root on Linux.
Read next: `drill/kinds.py`, `drill/drill_loop.py`.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.drill import kinds, netns
from benchmarks.drill.comparison import differences
from benchmarks.drill.drill_loop import Drill, Survived
from benchmarks.drill.experiments import EXPERIMENTS, Drilled
from benchmarks.drill.laboratory import Laboratory, laboratory
from benchmarks.report import Cell, Spread, Table
from openpi_train.training.goodput import read_account, share

COLUMNS = ("fault", "number", "survived", "run ended with", "steps trained again", "seconds to train again", "p95")
# While another fault is being mended.
_OVERLAPPING = 0.2


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m benchmarks fault_drill", description=__doc__)
    parser.add_argument("--faults", type=int, default=200, help="how many (%(default)s)")
    parser.add_argument("--hosts", type=int, default=4, help="of one process each; one more is spare (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of kinds, victims and times (%(default)s)")
    parser.add_argument("--first", type=int, default=1, help="begin with this fault of the sequence (%(default)s)")
    parser.add_argument("--experiment", choices=list(EXPERIMENTS), default="imitation", help="(%(default)s)")
    parser.add_argument(
        "--kinds", nargs="+", default=list(kinds.KINDS), choices=list(kinds.KINDS), metavar="KIND", help="(all)"
    )
    parser.add_argument("--small", action="store_true", help="without the kinds that take the longest to be noticed")
    parser.add_argument("--quick", action="store_true", help="one fault on two hosts, to check that it runs")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> list[Table]:
    """Run the drill and return its table."""
    flags = parse(argv)
    if reason := netns.why_not():
        return [Table("Fault drill", COLUMNS, [], [f"Not run: {reason}."])]
    if flags.quick:
        flags.faults, flags.hosts, flags.small = 1, 2, True
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="drill_") as place:
        # Fewer than one host in four is broken at a time.
        with laboratory(Path(place), flags.hosts + 1) as lab:
            return [_table(flags, lab, EXPERIMENTS[flags.experiment], began)]


def _table(flags: argparse.Namespace, lab: Laboratory, drilled: Drilled, began: float) -> Table:
    rng = random.Random(flags.seed)
    names = kinds.possible(flags.kinds, list(lab.missing), drilled, short=flags.small)
    faults = kinds.sequence(flags.faults, names, 0.0 if flags.quick else _OVERLAPPING, rng)
    drill = Drill(lab, drilled, flags.hosts, faults, flags.seed, flags.first, _tell)
    problem = drill.go() or differences(lab, drill.run, drilled, flags.hosts)
    account = read_account(drill.run.files()) or {"training": 0.0}
    minutes = (time.monotonic() - began) / 60
    last = drill.run.last_step()
    verdict = problem or f"{last} steps, every array of the last checkpoint and the metrics of every step the same bits"
    where = "; ".join(f"no {name}: {reason}" for name, reason in lab.missing.items())
    notes = [
        f"Against the undisturbed run: {verdict}.",
        f"Seed {flags.seed}; {minutes:.0f} minutes with the undisturbed run; goodput {share(account):.0%}. "
        f"{len(names)} of {len(kinds.KINDS)} kinds could be made here{f' ({where})' if where else ''}. Of faults that "
        "come while another is mended, the row is that of both.",
    ]
    hosts = f"{flags.hosts} hosts and a spare one"
    title = f"Fault drill: {drilled.name} experiment, {hosts}, a checkpoint every {drilled.save_interval} steps"
    return Table(title, COLUMNS, _rows(faults[flags.first - 1 :], drill.survived), notes, problem)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _rows(faults: Sequence[tuple[str, ...]], survived: Sequence[Survived]) -> list[list[Cell]]:
    """One row per kind, one for those that overlapped, and one for all."""
    rows = []
    for name in kinds.KINDS:
        rows += _row(name, [one for one in faults if one == (name,)], [one for one in survived if one.names == (name,)])
    both = [one for one in faults if len(one) > 1]
    rows += _row("two at once", both, [one for one in survived if len(one.names) > 1])
    return rows + _row("all", faults, survived)


def _row(name: str, faults: Sequence[tuple[str, ...]], survived: Sequence[Survived]) -> list[list[Cell]]:
    """The row of these faults; none without any."""
    number = sum(map(len, faults))
    if not number:
        return []
    if not survived:
        return [[name, number, 0, None, None, None, None]]
    codes = Counter(code for one in survived for code in one.codes or ("no restart",))
    seconds = tuple(one.recovery_s for one in survived)
    return [
        [
            name,
            number,
            sum(len(one.names) for one in survived),
            ", ".join(f"{code} ({count} x)" for code, count in sorted(codes.items(), key=str)),
            Spread(tuple(one.steps_again for one in survived)),
            Spread(seconds),
            _percentile_95(seconds),
        ]
    ]


def _percentile_95(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]
