"""What policies gain by RL: success before, during and after, over several seeds, with intervals.

Uses the commands of a user: each study imitates first, and goes on by RL from these weights. Initial states and
problems that are counted are in no training data. Read next: `rl_studies.py`, `docs/howto/reinforcement_learning.md`.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import itertools
import json
import math
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, Spread, Table
from benchmarks.rl_studies import STUDIES, Study, Trained, mean_interval, nearest_step, problems
from openpi_train.cli import parse_experiment
from openpi_train.envs.score import wilson
from openpi_train.experiment import Experiment
from openpi_train.runtime.exits import UsageError

SEEDS = (42, 43, 44)
COLUMNS = ("study", "step", "episodes", "CPU s", "success (lowest to highest seed)", "95 % interval", "success")
GAINS = ("study", "what", "CPU s", "gain (lowest to highest seed)", "95 % interval of the mean", "mean gain")
_QUICK_STUDY = "arithmetic_grpo"
# Steps of more imitation are a multiple of this.
_MORE = 50
# Added by --quick, which only checks that everything runs.
_QUICK = ("--batch-size", "8", "--eval.num-rows", "8", "--eval.num-prompts", "8", "--eval.completions-per-device", "8")
_QUICK += ("--lr-schedule.warmup-steps", "0", "--model.sizes.width", "16", "--model.sizes.mlp-dim", "16")
_QUICK_START = ("--num-train-steps", "1", "--save-interval", "1", "--eval.interval", "0")
_QUICK_PRACTICE = ("--num-train-steps", "1", "--save-interval", "1", "--eval.interval", "1", "--log-interval", "1")
_QUICK_PRACTICE += ("--rl.num-groups", "4", "--rl.group-size", "2")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m benchmarks rl", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=STUDIES, metavar="NAME", help=f"of {', '.join(STUDIES)}")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="seeds of all runs (%(default)s)")
    parser.add_argument("--out", type=Path, help="folder in which to keep the runs (default: they are deleted)")
    parser.add_argument("--quick", action="store_true", help="one small study, to check that it runs; others are read")
    flags = parser.parse_args(argv)
    if flags.quick:
        flags.seeds = flags.seeds[:1]
    return flags


def main(argv: Sequence[str]) -> list[Table]:
    """Run all studies, seed by seed, and return the tables of their curves and gains."""
    flags, rows, gains, notes, failures = parse(argv), [], [], [], []
    names = flags.only or list(STUDIES)
    for name in names:
        checked(STUDIES[name])
    with tempfile.TemporaryDirectory() as temporary:
        out = (flags.out or Path(temporary)).absolute()
        for name in [_QUICK_STUDY] if flags.quick else names:
            study = STUDIES[name]
            if study.package is not None and importlib.util.find_spec(study.package) is None:
                notes.append(f"{name}: not measured, without {study.package} (docs/install.md).")
                continue
            found = [trained(study, seed, out, quick=flags.quick) for seed in flags.seeds]
            rows += curve(name, found, 8 if flags.quick else counted(study, out))
            gains += gained(name, found)
            failures += [] if flags.quick else problems(name, study, found)
            seeds = ", ".join(map(str, flags.seeds))
            notes.append(f"{name}: {study.rl} from {study.start}, seeds {seeds}.")
    notes.append("CPU s are those of RL, with start, compilation and evaluations.")
    notes.append("Intervals are of all seeds' episodes, or problems, together; their policies differ, too.")
    return [
        Table("RL: success before and after", COLUMNS, rows, notes, failure="; ".join(failures)),
        Table("Gains of RL", GAINS, gains, ["Intervals are Student's, of the mean over seeds."]),
    ]


def checked(study: Study) -> Experiment:
    """The experiment of RL. Raises UsageError if a command of the study is not understood."""
    known = study.flags if not study.before else ()  # the others name data that are made first
    imitates = (*known, *study.start_flags, *study.quiet_flags)
    for name, more in ((study.start, imitates), (study.rl, known)):
        experiment = parse_experiment(name, ["--exp-name", "benchmark", *more])
        experiment.check(1)
    return experiment


def counted(study: Study, out: Path) -> int:
    """The episodes, or problems, of an evaluation; `out` has the data."""
    words = ["--exp-name", "benchmark", *_filled(study.flags, out)]
    experiment = parse_experiment(study.rl, words)
    closed_loop = getattr(experiment.eval, "closed_loop", None)
    found = closed_loop.num_episodes if closed_loop is not None else getattr(experiment.eval, "num_prompts", 0)
    if not found:
        raise UsageError(f"{experiment.name} counts no successes: give it episodes or prompts to evaluate")
    return found


def trained(study: Study, seed: int, out: Path, *, quick: bool = False) -> Trained:
    """Imitate, go on by RL and, where that is compared, imitate for as long; what is there is not done again."""
    runs = Runs(study, seed, out)
    out.mkdir(parents=True, exist_ok=True)
    made = out / f"{study.start}.made"  # all seeds have the same data
    if not made.exists():
        for command in study.before:
            _run(_filled(command, out))
        made.touch()
    start_flags = (*_QUICK, *_QUICK_START) if quick else study.start_flags
    start, start_s = runs.run(study.start, start_flags if quick else (*start_flags, *study.quiet_flags))
    weights = ("--weight-loader.params-path", str(_begun_from(start, study)))
    rl, cpu_s = runs.run(study.rl, (*weights, *_QUICK, *_QUICK_PRACTICE) if quick else weights)
    found = read(_lines(rl), study.measured, cpu_s)
    if study.most_by_imitation is None:
        return found
    done = parse_experiment(study.start, ["--exp-name", "x", *start_flags]).num_train_steps
    longer, longer_s = imitated_for(runs, study, start_flags, start, cpu_s, num_steps=done, step_s=start_s / done)
    return dataclasses.replace(
        found, imitated=read(_lines(longer), study.measured, longer_s).after, imitated_s=longer_s
    )


def imitated_for(
    runs: "Runs", study: Study, flags: Sequence[str], start: Path, cpu_s: float, *, num_steps: int, step_s: float
) -> tuple[Path, float]:
    """The run `start`, of `num_steps`, continued for at least `cpu_s` CPU seconds, and how many these were.

    A step was seen to take `step_s`; where that was too much, the run is continued once more.
    """
    spent = 0.0
    for turn in itertools.count():
        num_steps += num_more(cpu_s - spent, step_s)
        more = (*flags, "--num-train-steps", str(num_steps))
        more += ("--eval.interval", str(num_steps), "--eval.closed-loop.interval", str(num_steps))
        start, seconds = runs.run(study.start, more, place=f"longer/{turn}", copied=start)
        spent += seconds
        if spent >= cpu_s:
            break
    return start, spent


def _begun_from(start: Path, study: Study) -> Path:
    """The checkpoint of the run `start` from which RL begins."""
    if not study.start_nearest:
        return start
    assert study.start_between is not None, "start_nearest needs a range"
    return start / str(nearest_step(read(_lines(start), study.measured, 0.0).evaluations, study.start_between))


def num_more(cpu_s: float, step_s: float) -> int:
    """The steps of imitation, of `step_s` each, that take at least so many CPU seconds."""
    return math.ceil(cpu_s / step_s / _MORE) * _MORE


class Runs:
    """The runs of a seed. One that was interrupted goes on; one that is over is not repeated."""

    def __init__(self, study: Study, seed: int, out: Path):
        self._study, self._seed, self._out = study, seed, out

    def run(
        self, name: str, flags: Sequence[str], *, place: str = "", copied: Path | None = None
    ) -> tuple[Path, float]:
        """The directory of the experiment's run below `place`, which goes on from a copy of `copied` if that is given,
        and its CPU seconds.
        """
        base = self._out / str(self._seed) / place
        directory, record = base / name / "x", base / f"{name}.json"
        spent = json.loads(record.read_text()) if record.exists() else {"cpu_s": 0.0, "is_over": False}
        if spent["is_over"]:
            return directory, spent["cpu_s"]
        if copied is not None and not directory.exists():
            shutil.copytree(copied, directory)
        begun = any(one.name.isdecimal() for one in directory.glob("*"))
        words = [name, "--exp-name", "x", "--seed", str(self._seed), "--checkpoint-base-dir", str(base)]
        words += ["--assets-base-dir", str(self._out / "assets"), *_filled(self._study.flags, self._out), *flags]
        with _counted(record, spent):
            _run([*words, "--resume" if begun else "--overwrite"])
        return directory, spent["cpu_s"]


@contextlib.contextmanager
def _counted(record: Path, spent: dict[str, Any]) -> Iterator[None]:
    """Adds the CPU seconds of processes that are started to `spent`, which is written to a file also on errors."""
    before = _children_s()
    try:
        yield
        spent["is_over"] = True
    finally:
        spent["cpu_s"] += _children_s() - before
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(spent))


def _lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def read(lines: Any, measured: str, cpu_s: float) -> Trained:
    """What the lines of a run's log say."""
    found = list(lines)
    return Trained(
        {line["step"]: line[measured] for line in found if measured in line},
        max((line["clip_fraction"] for line in found if "clip_fraction" in line), default=0.0),
        cpu_s,
    )


def curve(name: str, found: Sequence[Trained], count: int) -> list[list[Any]]:
    """A row for each evaluation that all seeds have, of `count` episodes of each."""
    rows = []
    steps = sorted(set.intersection(*(set(one.evaluations) for one in found)))
    for step in steps:
        shares = Spread(tuple(one.evaluations[step] for one in found))
        total = count * len(found)
        low, high = wilson(round(count * sum(shares.samples)), total)
        mean = sum(shares.samples) / len(found)
        seconds = Spread(tuple(one.cpu_s for one in found)) if step == steps[-1] else None
        rows.append([name, str(step), total, seconds, shares, f"{low:.0%} to {high:.0%}", mean])
    return rows


def gained(name: str, found: Sequence[Trained]) -> list[list[Any]]:
    """A row for RL, and one for more imitation where that was measured."""
    arms = [("rl", [one.gain for one in found], [one.cpu_s for one in found])]
    longer = [one for one in found if one.imitated is not None]
    if longer:
        arms.append(
            ("more imitation", [one.imitated - one.before for one in longer], [one.imitated_s for one in longer])
        )
    rows = []
    for what, gains, seconds in arms:
        interval = mean_interval(gains)
        shown = None if interval is None else f"{interval[0]:.1%} to {interval[1]:.1%}"
        rows.append([name, what, Spread(tuple(seconds)), Spread(tuple(gains)), shown, statistics.fmean(gains)])
    return rows


def _filled(words: Sequence[str], out: Path) -> list[str]:
    return [word.format(out=out) for word in words]


def _run(words: Sequence[str]) -> None:
    subprocess.run([sys.executable, "-m", "openpi_train", *words], cwd=ROOT, check=True)


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
