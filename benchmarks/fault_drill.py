"""Random faults during one long run of the `debug` experiment under `launch local --max-restarts`.

Measures for each fault the seconds until the run trains again, and the repeated steps. At the end the run is stopped
and compared with an undisturbed one: every array of the last checkpoint and every loss must be bit-identical.
With --quick the experiment is a smaller one (`launched_small.py`), on one process. Read next: `faults.py` (the faults),
`launched.py`.
"""

import argparse
import contextlib
import dataclasses
import json
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from benchmarks.faults import FAULTS, FaultFailed, has_own_network, sequence, small_disk
from benchmarks.launched import DEBUG, OWN_NETWORK, SMALL, Launched, run_directory
from benchmarks.report import Cell, Spread, Table

NUM_PROCESSES = 2
TIMEOUT_S = 240.0
# Whose harm is noticed after a kill.
QUICK_KINDS = ["damaged checkpoint"]
_MODEL = ("--model.remat", "none", "--model.language.depth", "1", "--model.action-expert.depth", "1")
_FLAGS = ("--batch-size", "4", "--save-interval", "10", "--keep-last", "3", "--no-tensorboard")
_FLAGS += ("--data.validation-fraction", "0", "--timeouts.lost-s", "8", "--timeouts.stuck-s", "8")
# Compiling takes longer than a save: with the usual half hour a hang in a save would be the whole drill.
_FLAGS += ("--timeouts.phase-s", "60")
EXPERIMENT, QUICK_EXPERIMENT = (DEBUG, *_MODEL, *_FLAGS), (SMALL, *_FLAGS)
ENDLESS = ("--num-train-steps", "1000000")
COLUMNS = ("fault", "number", "survived", "run ended with", "steps trained again", "seconds to train again")
# Metrics that depend on the machine.
_MEASURED = re.compile(r"(time|data)/.*|(samples|tokens)_per_s|mfu|hfu")

# Log lines of process 0, and the launcher's line when it restarts the run.
_STEP = re.compile(r" I step (\d+)/")
_CONTINUING = re.compile(r" I continuing from step (\d+) of ")
_AGAIN = re.compile(r"^starting again in .*: (?:process .* exit code (\d+)|it was asked to stop)")


@dataclasses.dataclass(frozen=True)
class Survived:
    """The cost of one fault. `code` is the run's exit code, as its launcher saw it."""

    kind: str
    code: int
    steps_again: int
    recovery_s: float


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m benchmarks fault_drill", description=__doc__)
    parser.add_argument("--faults", type=int, default=50, help="how many (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of kinds, victims and times (%(default)s)")
    parser.add_argument("--kinds", nargs="+", default=list(FAULTS), choices=list(FAULTS), help="(all)")
    parser.add_argument("--small", action="store_true", help="of the experiment that compiles in seconds")
    parser.add_argument("--quick", action="store_true", help="one fault, to check that it runs")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> list[Table]:
    """Run the drill and return its table."""
    flags = parse(argv)
    rng, began = random.Random(flags.seed), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="benchmark-faults-") as folder, contextlib.ExitStack() as stack:
        base, kinds = Path(folder) / "disk", QUICK_KINDS
        prefix: Sequence[str] = ()
        if not flags.quick:
            has_disk, has_network = stack.enter_context(small_disk(base)), has_own_network()
            prefix = OWN_NETWORK if has_network else ()
            impossible = {"full disk": not has_disk, "cut link": not has_network}
            kinds = [kind for kind in flags.kinds if not impossible.get(kind)]
        experiment = QUICK_EXPERIMENT if flags.quick or flags.small else EXPERIMENT
        processes = 1 if flags.quick else NUM_PROCESSES
        faults = sequence(1 if flags.quick else flags.faults, kinds, rng)
        drill = Drill(base, experiment, faults, rng, prefix, processes)
        problem = drill.run() or compare(base, Path(folder) / "undisturbed", experiment, processes)
        minutes = (time.monotonic() - began) / 60
    verdict = problem or f"{drill.steps} steps, every array of the last checkpoint and every loss the same bits"
    notes = [
        f"Against the undisturbed run: {verdict}.",
        f"Seed {flags.seed}; {minutes:.0f} minutes with the undisturbed run. After a full disk the drill makes room and"
        f" starts the run again, else the launcher does. {len(kinds)} of {len(FAULTS)} kinds could be made here.",
    ]
    name = experiment[0].rpartition(":")[2]
    title = f"Fault drill: {name} experiment, {processes} processes, a checkpoint every 10 steps"
    return [Table(title, COLUMNS, drill.rows(), notes, problem)]


class Drill:
    """The run below `base`, the remaining faults, and the results of past ones."""

    def __init__(
        self,
        base: Path,
        experiment: Sequence[str],
        kinds: Sequence[str],
        rng: random.Random,
        prefix: Sequence[str],
        processes: int,
    ):
        self._base, self._experiment, self._kinds, self._rng, self._prefix = base, experiment, kinds, rng, prefix
        self._processes = processes
        self._survived: list[Survived] = []
        self.steps = 0

    def run(self) -> str:
        """Inject all faults, then stop; returns what went wrong, or an empty string."""
        self._run = self._launch()
        try:
            for number, kind in enumerate(self._kinds):
                try:
                    self._survived.append(self._one(kind))
                except FaultFailed as error:
                    return f"fault {number + 1} ({kind}): {error}\n{self._run.said(150)}"
            code = self._run.stop()
            self.steps = self._run.last_step()
            return "" if code == 75 else f"the stop at the end: code {code} instead of 75\n{self._run.said()}"
        finally:
            self._run.close()

    def rows(self) -> list[list[Cell]]:
        """One row per kind, and one for all."""
        kinds = [kind for kind in FAULTS if kind in self._kinds]
        return [
            _row(kind, self._kinds.count(kind), [one for one in self._survived if one.kind == kind]) for kind in kinds
        ] + [_row("all", len(self._kinds), self._survived)]

    def _launch(self) -> Launched:
        launcher = ("--processes", str(self._processes), "--max-restarts", str(2 * len(self._kinds)), "--grace-s", "3")
        return Launched(self._base, launcher, (*self._experiment, *ENDLESS, "--resume"), self._prefix)

    def _one(self, kind: str) -> Survived:
        """Inject one fault once there is progress to lose, and wait until the run trains again."""
        run, before = self._run, self._run.last_step()
        if not run.wait(lambda: len(run.checkpoints()) >= 2 and run.checkpoints()[-1] > before, TIMEOUT_S):
            raise FaultFailed("no progress before it")
        time.sleep(self._rng.uniform(0.0, 1.5))
        heard, before = len(run.lines), run.last_step()
        at = FAULTS[kind](run, self._rng)
        steps = [int(found[1]) for line in run.lines[heard:] if (found := _STEP.search(line.text))]
        reached = max([before, run.last_step(), *steps])
        code, told = run.process.poll(), 0
        if code is not None:
            run = self._run = self._launch()
        else:
            code, told = self._said_why(at)
        place = run.await_place(_CONTINUING, TIMEOUT_S, told)
        trained = None if place is None else run.await_place(_STEP, TIMEOUT_S, place)
        if place is None or trained is None:
            raise FaultFailed("the run did not train again")
        if kind == "damaged checkpoint" and run.await_place("cannot be used", 0.0, told) is None:
            raise FaultFailed("nobody noticed the damage")
        found = _CONTINUING.search(run.lines[place].text)
        assert found
        return Survived(kind, code, reached - int(found[1]), run.lines[trained].at - at)

    def _said_why(self, at: float) -> tuple[int, int]:
        """The exit code for which the launcher restarted the run after the time `at`, and the line number that says
        so."""
        first = sum(line.at < at for line in self._run.lines)
        place = self._run.await_place(_AGAIN, TIMEOUT_S, first)
        found = None if place is None else _AGAIN.search(self._run.lines[place].text)
        if place is None or found is None:
            raise FaultFailed("the launcher did not start the run again")
        return int(found[1] or 75), place


def _row(name: str, number: int, survived: Sequence[Survived]) -> list[Cell]:
    if not survived:
        return [name, number, 0, None, None, None]
    codes = Counter(one.code for one in survived)
    return [
        name,
        number,
        len(survived),
        ", ".join(f"{code} ({count} x)" for code, count in sorted(codes.items())),
        Spread(tuple(one.steps_again for one in survived)),
        Spread(tuple(one.recovery_s for one in survived)),
    ]


def compare(disturbed: Path, undisturbed: Path, experiment: Sequence[str], processes: int) -> str:
    """Train the same number of steps without faults; returns the differences, or an empty string."""
    directories = [run_directory(base, experiment[0]) for base in (disturbed, undisturbed)]
    found = _metrics(directories[0])
    last = max(found)
    length = ("--num-train-steps", str(last))
    with Launched(undisturbed, ("--processes", str(processes)), (*experiment, *length)) as run:
        if (code := run.end(TIMEOUT_S + 2 * last)) != 0:
            return f"the undisturbed run ended with code {code}\n{run.said()}"
    expected = _metrics(directories[1])
    if wrong := [step for step in expected if found.get(step) != expected[step]]:
        return f"the metrics of {len(wrong)} of {last} steps differ from the undisturbed run's, first at {wrong[0]}"
    ours, theirs = (_arrays(directory / str(last)) for directory in directories)
    different = [name for name in theirs if name not in ours or ours[name].tobytes() != theirs[name].tobytes()]
    if different or len(ours) != len(theirs):
        return f"{len(different)} of {len(theirs)} arrays of checkpoint {last} differ, first {different[:1]}"
    return ""


def _metrics(directory: Path) -> dict[int, dict[str, Any]]:
    """The metrics of each step, without those that depend on the machine."""
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return {
        line["step"]: {name: value for name, value in line.items() if not _MEASURED.fullmatch(name)}
        for line in lines
        if "loss" in line
    }


def _arrays(checkpoint: Path) -> dict[str, np.ndarray]:
    """All arrays of a checkpoint by item and path: the published parameters and the training state."""
    arrays = {}
    with ocp.PyTreeCheckpointer() as reader:
        for item in ("params", "train_state"):
            stored: Any = reader.metadata(checkpoint / item)
            tree = getattr(stored, "item_metadata", stored).tree
            wanted = jax.tree.map(lambda _: ocp.ArrayRestoreArgs(restore_type=np.ndarray), tree)
            values = reader.restore(checkpoint / item, ocp.args.PyTreeRestore(item=tree, restore_args=wanted))
            flat, _ = jax.tree_util.tree_flatten_with_path(values)
            arrays |= {item + jax.tree_util.keystr(path): np.asarray(value) for path, value in flat}
    return arrays
