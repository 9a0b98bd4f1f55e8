"""What policies gain by practice: success before, during and after, over several seeds, with intervals.

Uses the commands of a user: each study imitates first, and practises from these weights. Initial states and problems
that are counted are in no training data. Read next: `docs/practice.md`, `configs/tabletop_practice.py`.
"""

import argparse
import dataclasses
import importlib.util
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, Spread, Table, number
from openpi_train.cli import parse_experiment
from openpi_train.envs.score import wilson
from openpi_train.experiment import Experiment
from openpi_train.runtime.exits import UsageError

SEEDS = (42, 43, 44)
# A larger share of clipped units says that the learning rate is too high.
MOST_CLIPPED = 0.2
COLUMNS = ("study", "step", "episodes", "CPU s", "success (lowest to highest seed)", "95 % interval", "success")
_SUCCESS, _SOLVED = "success/all", "val/exact_match"
# Added by --quick, which only checks that everything runs.
_QUICK = ("--batch-size", "8", "--eval.num-rows", "8", "--eval.num-prompts", "8", "--eval.completions-per-device", "8")
_QUICK += ("--lr-schedule.warmup-steps", "0", "--model.sizes.width", "16", "--model.sizes.mlp-dim", "16")
_QUICK_START = ("--num-train-steps", "1", "--save-interval", "1", "--eval.interval", "0")
_QUICK_PRACTICE = ("--num-train-steps", "1", "--save-interval", "1", "--eval.interval", "1", "--log-interval", "1")
_QUICK_PRACTICE += ("--practice.num-groups", "4", "--practice.group-size", "2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """An experiment that imitates, with its flags, and one that practises from its weights.

    `before` are commands that make its data, which all its runs take by `flags`. `{out}` is the output folder.
    """

    start: str
    practice: str
    start_flags: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    before: tuple[tuple[str, ...], ...] = ()
    package: str | None = None

    @property
    def measured(self) -> str:
        """The metric that counts."""
        return _SOLVED if self.practice.startswith("arithmetic") else _SUCCESS


STUDIES: Mapping[str, Study] = {
    "tabletop_pi0": Study(start="tabletop_few", practice="tabletop_few_rloo"),
    # Half trained: it succeeds in nearly all episodes in the end.
    "tabletop_dp": Study(
        start="tabletop_dp",
        practice="tabletop_dp_rloo",
        start_flags=("--num-train-steps", "200", "--save-interval", "200", "--eval.interval", "0",
                     "--eval.closed-loop.interval", "0"),
    ),
    "tabletop_fast": Study(
        start="tabletop_fast",
        practice="tabletop_fast_rloo",
        flags=("--model.fast-tokenizer", "{out}/fast"),
        before=(("data", "fit-fast", "tabletop_fast", "--vocab-size", "384", "--out", "{out}/fast"),),
    ),
    "metaworld": Study(
        start="metaworld_reach",
        practice="metaworld_rloo",
        flags=("--dataset", "{out}/metaworld_reach.zarr"),
        before=(("data", "collect", "metaworld", "--tasks", "reach", "--out", "{out}/metaworld_reach.zarr"),),
        package="metaworld",
    ),
    "arithmetic_grpo": Study(start="arithmetic_sft", practice="arithmetic_grpo"),
    "arithmetic_rloo": Study(start="arithmetic_sft", practice="arithmetic_rloo"),
    "arithmetic_ppo": Study(start="arithmetic_sft", practice="arithmetic_ppo"),
}  # fmt: skip
_QUICK_STUDY = "arithmetic_grpo"


@dataclasses.dataclass(frozen=True)
class Practised:
    """One seed's run: its evaluations by step, the largest share of clipped units, and the CPU seconds of all of it."""

    evaluations: Mapping[int, float]
    clipped: float
    cpu_s: float


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks practice", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=STUDIES, metavar="NAME", help=f"of {', '.join(STUDIES)}")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="seeds of all runs (%(default)s)")
    parser.add_argument("--out", type=Path, help="folder in which to keep the runs (default: they are deleted)")
    parser.add_argument("--quick", action="store_true", help="one small study, to check that it runs; others are read")
    flags = parser.parse_args(argv)
    if flags.quick:
        flags.seeds = flags.seeds[:1]
    return flags


def main(argv: Sequence[str]) -> list[Table]:
    """Run all studies, seed by seed, and return the table of their curves."""
    flags, rows, notes, failures = parse(argv), [], [], []
    names = flags.only or list(STUDIES)
    for name in names:
        checked(STUDIES[name])
    with tempfile.TemporaryDirectory() as temporary:
        out = (flags.out or Path(temporary)).absolute()
        for name in [_QUICK_STUDY] if flags.quick else names:
            study = STUDIES[name]
            if study.package is not None and importlib.util.find_spec(study.package) is None:
                notes.append(f"{name}: not measured, without {study.package} (pip install 'openpi_train[sim]').")
                continue
            found = [practised(study, seed, out, quick=flags.quick) for seed in flags.seeds]
            rows += curve(name, found, 8 if flags.quick else counted(checked(study)))
            failures += [] if flags.quick else problems(name, found)
            seeds = ", ".join(map(str, flags.seeds))
            notes.append(f"{name}: {study.practice} from {study.start}, seeds {seeds}.")
    notes.append("CPU s are those of practice, with start, compilation and evaluations.")
    notes.append("Intervals are of all seeds' episodes, or problems, together; their policies differ, too.")
    return [Table("Practice: success before and after", COLUMNS, rows, notes, failure="; ".join(failures))]


def checked(study: Study) -> Experiment:
    """The experiment that practises. Raises UsageError if a command of the study is not understood."""
    for name, more in ((study.start, study.start_flags), (study.practice, ())):
        experiment = parse_experiment(name, ["--exp-name", "benchmark", *more])
        experiment.check(1)
    return experiment


def counted(experiment: Experiment) -> int:
    """The episodes, or problems, of an evaluation."""
    closed_loop = getattr(experiment.eval, "closed_loop", None)
    found = closed_loop.num_episodes if closed_loop is not None else getattr(experiment.eval, "num_prompts", 0)
    if not found:
        raise UsageError(f"{experiment.name} counts no successes: give it episodes or prompts to evaluate")
    return found


def practised(study: Study, seed: int, out: Path, *, quick: bool = False) -> Practised:
    """Imitate, unless a run with this seed is there, and practise."""

    def words(name: str, more: Sequence[str]) -> list[str]:
        places = ["--checkpoint-base-dir", f"{out}/{seed}", "--assets-base-dir", f"{out}/assets"]
        return [name, "--exp-name", "x", "--seed", str(seed), *places, *_filled(study.flags, out), *more]

    out.mkdir(parents=True, exist_ok=True)
    start = out / str(seed) / study.start / "x"
    if not start.exists():
        made = out / f"{study.start}.made"  # all seeds have the same data
        for command in () if made.exists() else study.before:
            _run(_filled(command, out))
        made.touch()
        _run(words(study.start, (*_QUICK, *_QUICK_START) if quick else study.start_flags))
    before = _children_s()
    more = ("--overwrite", "--weight-loader.params-path", str(start))
    _run(words(study.practice, (*more, *_QUICK, *_QUICK_PRACTICE) if quick else more))
    lines = (out / str(seed) / study.practice / "x" / "metrics.jsonl").read_text().splitlines()
    return read(map(json.loads, lines), study.measured, _children_s() - before)


def read(lines: Any, measured: str, cpu_s: float) -> Practised:
    """What the lines of a run's log say."""
    found = list(lines)
    return Practised(
        {line["step"]: line[measured] for line in found if measured in line},
        max((line["clip_fraction"] for line in found if "clip_fraction" in line), default=0.0),
        cpu_s,
    )


def curve(name: str, found: Sequence[Practised], count: int) -> list[list[Any]]:
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


def problems(name: str, found: Sequence[Practised]) -> list[str]:
    """What is not as required, as sentences: practice must help on average, without large steps."""
    gains = [one.evaluations[max(one.evaluations)] - one.evaluations[min(one.evaluations)] for one in found]
    said = []
    if sum(gains) <= 0:
        said.append(f"{name} gains {sum(gains) / len(gains):.1%} by practice; wanted: more than 0")
    if (clipped := max(one.clipped for one in found)) > MOST_CLIPPED:
        said.append(f"{name} clips {number(clipped)} of its units; wanted: at most {MOST_CLIPPED}")
    return said


def _filled(words: Sequence[str], out: Path) -> list[str]:
    return [word.format(out=out) for word in words]


def _run(words: Sequence[str]) -> None:
    subprocess.run([sys.executable, "-m", "openpi_train", *words], cwd=ROOT, check=True)


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
