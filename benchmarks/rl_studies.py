"""The studies of `rl.py`: what imitates, what goes on by RL, and what is wanted of the success.

What is wanted holds of means over seeds. Read next: `rl.py`.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from benchmarks.report import number

SUCCESS, SOLVED = "success/all", "val/exact_match"
# A larger share of clipped units says that the learning rate is too high.
MOST_CLIPPED = 0.2
# What imitates is evaluated where RL begins. It acts before its first and after its last step in any case.
_QUIET = ("--eval.interval", "0")
_QUIET_ROBOT = (*_QUIET, "--eval.closed-loop.interval", "0", "--eval.closed-loop.episodes-per-task", "1")

# Half of the episodes of RL are enough to choose a checkpoint.
_EVERY_50 = ("--save-interval", "50", "--keep-period", "50", "--eval.interval", "50")
_EVERY_50 += ("--eval.closed-loop.interval", "50", "--eval.closed-loop.episodes-per-task", "50")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """An experiment that imitates, with its flags, and one that goes on by RL.

    `before` are commands that make its data, which all its runs take by `flags`. `{out}` is the output folder.

    Attributes, all of mean success over seeds, as shares:
        least_gain: RL must gain more than this, or so much if it is above 0.
        most_by_imitation: what as many CPU seconds of more imitation may gain; None: this is not measured.
        start_between: where RL must begin; None: anywhere.
        start_nearest: RL begins at the checkpoint of imitation that was evaluated nearest the middle of
            `start_between`, instead of the last: how soon imitation succeeds differs between seeds.
        least_end: where it must end.
    """

    start: str
    rl: str
    start_flags: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    before: tuple[tuple[str, ...], ...] = ()
    package: str | None = None
    least_gain: float = 0.0
    most_by_imitation: float | None = None
    start_between: tuple[float, float] | None = None
    start_nearest: bool = False
    least_end: float = 0.0

    @property
    def measured(self) -> str:
        """The metric that counts."""
        return SOLVED if self.rl.startswith("arithmetic") else SUCCESS

    @property
    def quiet_flags(self) -> tuple[str, ...]:
        """Flags with which what imitates is hardly evaluated, unless its evaluations count."""
        if self.start_nearest:
            return ()
        return _QUIET if self.measured == SOLVED else _QUIET_ROBOT


# Imitates so long that more of it helps little.
_PI0 = Study(
    start="tabletop_few",
    rl="tabletop_few_rloo",
    start_flags=("--num-train-steps", "4200"),
    flags=("--eval.closed-loop.episodes-per-task", "200"),
    least_gain=0.08,
    most_by_imitation=0.03,
)
_ARITHMETIC = Study(
    start="arithmetic_sft",
    rl="arithmetic_grpo",
    start_between=(0.45, 0.6),
    least_end=0.85,
)
STUDIES: Mapping[str, Study] = {
    "arithmetic_grpo": _ARITHMETIC,
    "arithmetic_rloo": dataclasses.replace(_ARITHMETIC, rl="arithmetic_rloo"),
    "arithmetic_ppo": dataclasses.replace(_ARITHMETIC, rl="arithmetic_ppo"),
    "tabletop_pi0": _PI0,
    "tabletop_weighted": dataclasses.replace(_PI0, rl="tabletop_few_weighted", least_gain=0.0, most_by_imitation=None),
    "tabletop_indicator": dataclasses.replace(
        _PI0, rl="tabletop_few_indicator", least_gain=0.0, most_by_imitation=None
    ),
    # Half trained: it succeeds in nearly all episodes in the end.
    "tabletop_dp": Study(
        start="tabletop_dp",
        rl="tabletop_dp_rloo",
        start_flags=("--num-train-steps", "150", "--save-interval", "150"),
        least_gain=0.08,
    ),
    "tabletop_fast": Study(
        start="tabletop_fast",
        rl="tabletop_fast_rloo",
        flags=("--model.fast-tokenizer", "{out}/fast", "--eval.closed-loop.episodes-per-task", "200"),
        before=(("data", "fit-fast", "tabletop_fast", "--vocab-size", "257", "--scale", "3", "--out", "{out}/fast"),),
        least_gain=0.08,
    ),
    # Half trained, as above: after all 450 steps some seeds always succeed.
    "metaworld": Study(
        start="metaworld_reach",
        rl="metaworld_rloo",
        start_flags=_EVERY_50,
        start_nearest=True,
        flags=("--dataset", "{out}/metaworld_reach.zarr"),
        before=(("data", "collect", "metaworld", "--tasks", "reach", "--out", "{out}/metaworld_reach.zarr"),),
        package="metaworld",
        start_between=(0.4, 0.6),
        least_end=0.8,
    ),
    # Few demonstrations, of which more imitation learns nothing new.
    "fetch": Study(
        start="fetch_reach_few",
        rl="fetch_reach_ppo",
        flags=("--dataset", "{out}/fetch_reach", "--eval.closed-loop.episodes-per-task", "100"),
        before=(
            ("data", "collect", "fetch:reach", "--out", "{out}/fetch_reach.zarr", "--episodes-per-task", "4"),
            ("data", "convert", "{out}/fetch_reach.zarr", "{out}/fetch_reach", "--to", "lerobot", "--control-hz", "25"),
        ),
        package="gymnasium_robotics",
        least_gain=0.08,
        most_by_imitation=0.05,
    ),
}


@dataclasses.dataclass(frozen=True)
class Trained:
    """One seed's run: its evaluations by step, the largest share of clipped units, and the CPU seconds of all of it.

    `imitated` is the success after more imitation from the same start, which took `imitated_s` CPU seconds.
    """

    evaluations: Mapping[int, float]
    clipped: float
    cpu_s: float
    imitated: float | None = None
    imitated_s: float | None = None

    @property
    def before(self) -> float:
        """Success before the first step."""
        return self.evaluations[min(self.evaluations)]

    @property
    def after(self) -> float:
        """Success after the last step."""
        return self.evaluations[max(self.evaluations)]

    @property
    def gain(self) -> float:
        """What RL gained."""
        return self.after - self.before


def nearest_step(evaluations: Mapping[int, float], between: tuple[float, float]) -> int:
    """The step, after the first, whose success is nearest the middle of `between`; of several the first."""
    middle = sum(between) / 2
    return min((step for step in sorted(evaluations) if step), key=lambda step: abs(evaluations[step] - middle))


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Student's interval of the mean of normally distributed values; None for fewer than two."""
    if len(values) < 2:
        return None
    from scipy import stats  # takes half a second, so only on use

    quantile = float(stats.t.ppf((1 + confidence) / 2, len(values) - 1))
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    return mean - half, mean + half


def problems(name: str, study: Study, found: Sequence[Trained]) -> list[str]:
    """What is not as wanted, as sentences."""
    before, after = (statistics.fmean(getattr(one, when) for one in found) for when in ("before", "after"))
    gain, said = after - before, []
    if gain <= 0 or gain < study.least_gain:
        wanted = f"at least {study.least_gain:.0%}" if study.least_gain else "more than 0"
        said.append(f"{name} gains {gain:.1%} by RL; wanted: {wanted}")
    if study.start_between is not None and not study.start_between[0] <= before <= study.start_between[1]:
        low, high = study.start_between
        said.append(f"{name} begins at {before:.1%}; wanted: {low:.0%} to {high:.0%}")
    if after < study.least_end:
        said.append(f"{name} ends at {after:.1%}; wanted: at least {study.least_end:.0%}")
    if study.most_by_imitation is not None:
        longer = [one.imitated - one.before for one in found if one.imitated is not None]
        if len(longer) < len(found):
            said.append(f"{name}: more imitation is not measured")
        elif statistics.fmean(longer) >= study.most_by_imitation:
            more, most = statistics.fmean(longer), study.most_by_imitation
            said.append(f"{name} gains {more:.1%} by more imitation; wanted: less than {most:.0%}")
    if (clipped := max(one.clipped for one in found)) > MOST_CLIPPED:
        said.append(f"{name} clips {number(clipped)} of its units; wanted: at most {MOST_CLIPPED}")
    return said
