"""Post-training of a language model on the arithmetic task: supervised, reward model, DPO; share of problems solved.

Uses the commands of a user. The problems that are counted are in no training data, and one answer of each is sampled
(temperature 1). Read next: `configs/arithmetic_runs.py`, `openpi_train/data/text/arithmetic.py`.
"""

import argparse
import dataclasses
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, Cell, Table, number
from openpi_train.envs.score import wilson

# What is required: the share solved after supervised training, what DPO adds and as much more supervised training
# does not, and the share of held-out pairs in which the reward model prefers the right answer.
SUPERVISED, DPO_GAIN, MORE_GAIN, PAIRS = (0.45, 0.60), 0.25, 0.05, 0.85
NUM_PROBLEMS = 1100
SOLVED, PREFERRED = "val/exact_match", "val/pair_accuracy"
_QUICK = ("--num-train-steps", "2", "--eval.interval", "2", "--eval.num-rows", "8", "--batch-size", "8")
_QUICK += ("--lr-schedule.kind", "constant", "--lr-schedule.warmup-steps", "1", "--save-interval", "2")
_QUICK_PROMPTS = ("--eval.num-prompts", "8", "--eval.completions-per-device", "8")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """A training run: an experiment with flags. All but the first start from the weights of the first."""

    title: str
    experiment: str
    run: str = "x"
    flags: tuple[str, ...] = ()
    counts_problems: bool = True


SFT = Stage(title="supervised", experiment="arithmetic_sft")
REWARD = Stage(title="reward model", experiment="arithmetic_reward", counts_problems=False)
DPO = Stage(title="DPO + likelihood", experiment="arithmetic_dpo")
# A step of DPO passes twice as many texts through the model, and through the reference besides.
MORE = Stage(
    title="more supervised",
    experiment="arithmetic_sft",
    run="more",
    flags=("--num-train-steps", "200", "--eval.interval", "100", "--lr-schedule.kind", "constant",
           "--lr-schedule.peak-lr", "2e-4"),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Trained:
    """A stage's run: its evaluations, in order, and the CPU seconds of its whole process."""

    stage: Stage
    evaluations: list[dict[str, Any]]
    cpu_s: float

    def last(self, name: str) -> float:
        """The value of the last evaluation."""
        return self.evaluations[-1][name]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m benchmarks language", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder in which to keep the runs (default: they are deleted)")
    parser.add_argument("--seed", type=int, default=42, help="seed of all runs (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a few steps, to check that it runs")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> list[Table]:
    """Train all stages and return the table of their evaluations."""
    flags = parse(argv)
    with tempfile.TemporaryDirectory() as temporary:
        out = (flags.out or Path(temporary)).absolute()
        started = time.monotonic()
        stages = (SFT, DPO) if flags.quick else (SFT, REWARD, DPO, MORE)
        found = [train(stage, out, seed=flags.seed, quick=flags.quick) for stage in stages]
        wall_s = time.monotonic() - started
    cpu_s = [f"{one.stage.title} {number(one.cpu_s)}" for one in found]
    all_s = sum(one.cpu_s for one in found)
    notes = [
        f"{NUM_PROBLEMS:,} held-out problems and as many pairs. All stages but the first start from its result.",
        f"CPU seconds with start, compilation and evaluations: {', '.join(cpu_s)}; together {number(all_s)}, in "
        f"{number(wall_s)} s.",
    ]
    return [table(found, notes, "" if flags.quick else failure(*found))]


def train(stage: Stage, out: Path, *, seed: int = 42, quick: bool = False) -> Trained:
    """Train a stage in `out`, where the first one must have been trained."""
    words = ["--exp-name", stage.run, "--overwrite", "--seed", str(seed), *stage.flags]
    words += ["--checkpoint-base-dir", f"{out}/runs", "--assets-base-dir", f"{out}/assets"]
    if stage != SFT:
        words += ["--weight-loader.params-path", str(run_directory(SFT, out))]
    if quick:
        words += [*_QUICK, *(_QUICK_PROMPTS if stage.counts_problems else ())]
    before = _children_s()
    subprocess.run([sys.executable, "-m", "openpi_train", stage.experiment, *words], cwd=ROOT, check=True)
    lines = (run_directory(stage, out) / "metrics.jsonl").read_text().splitlines()
    evaluations = [line for line in map(json.loads, lines) if "val/loss" in line]
    return Trained(stage, evaluations, _children_s() - before)


def run_directory(stage: Stage, out: Path) -> Path:
    """The run directory of `train`."""
    return out / "runs" / stage.experiment / stage.run


def table(found: Sequence[Trained], notes: Sequence[str], failed: str) -> Table:
    """A row for each evaluation."""
    columns = ("stage", "step", "held-out loss", "right answer preferred", "solved, 95 % interval", "solved")
    rows = [_row(one.stage, line) for one in found for line in one.evaluations]
    return Table("Language: post-training on the arithmetic task", columns, rows, notes, failed)


def _row(stage: Stage, line: Mapping[str, Any]) -> list[Cell]:
    solved, interval = line.get(SOLVED), None
    if solved is not None:
        interval = "{:.0%} to {:.0%}".format(*wilson(round(solved * NUM_PROBLEMS), NUM_PROBLEMS))
    return [stage.title, str(line["step"]), line["val/loss"], line.get(PREFERRED), interval, solved]


def failure(sft: Trained, reward: Trained, dpo: Trained, more: Trained) -> str:
    """What is not as required, as sentences."""
    solved, low, high = sft.last(SOLVED), *SUPERVISED
    gains = {one.stage.title: one.last(SOLVED) - solved for one in (dpo, more)}
    problems = []
    if not low <= solved <= high:
        problems.append(f"supervised training solves {solved:.1%}; wanted: {low:.0%} to {high:.0%}")
    if reward.last(PREFERRED) < PAIRS:
        problems.append(f"the reward model prefers {reward.last(PREFERRED):.1%} right answers; wanted: {PAIRS:.0%}")
    if gains[dpo.stage.title] < DPO_GAIN:
        problems.append(f"DPO adds {gains[dpo.stage.title]:.1%}; wanted: {DPO_GAIN:.0%}")
    if gains[more.stage.title] >= MORE_GAIN:
        problems.append(f"more supervised training adds {gains[more.stage.title]:.1%}; wanted: below {MORE_GAIN:.0%}")
    return "; ".join(problems)


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
