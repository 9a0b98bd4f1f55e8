"""Success rates of a policy, per task and overall, with confidence intervals.

Read next: `closed_loop.py`, which runs the episodes.
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any


def wilson(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """The Wilson score interval of a probability of success (Wilson 1927); (0, 1) for no trial.

    It stays within [0, 1] and is valid for few trials and for rates of 0 and 1, unlike the normal approximation.

    Raises ValueError if the counts or the confidence are out of range.
    """
    if not 0 <= successes <= trials or not 0 < confidence < 1:
        raise ValueError(f"{successes} successes of {trials} trials with confidence {confidence} are not valid")
    if trials == 0:
        return 0.0, 1.0
    # scipy.stats has it, too, and takes half a second of every evaluation's start.
    z = statistics.NormalDist().inv_cdf((1 + confidence) / 2)
    failures, weight = trials - successes, trials + z**2
    middle = (successes + z**2 / 2) / weight
    margin = z / weight * math.sqrt(successes * failures / trials + z**2 / 4)
    return middle - margin if successes else 0.0, middle + margin if failures else 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpisodeResult:
    """How one episode ended: `steps` are the control steps until success, or all steps if there was none."""

    number: int
    task: str
    success: bool
    steps: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rate:
    """Successes and trials; `mean_steps` is the mean number of control steps until success, None if there was none."""

    successes: int
    trials: int
    mean_steps: float | None

    @property
    def share(self) -> float:
        """The success rate: successes per trial."""
        return self.successes / self.trials

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % Wilson score interval of the rate."""
        return wilson(self.successes, self.trials)

    def as_json(self) -> dict[str, Any]:
        """Counts, share and interval."""
        low, high = self.interval
        return {**dataclasses.asdict(self), "rate": self.share, "low": low, "high": high}


def rate(episodes: Sequence[EpisodeResult]) -> Rate:
    """The success rate of these episodes, at least one."""
    steps = [episode.steps for episode in episodes if episode.success]
    return Rate(successes=len(steps), trials=len(episodes), mean_steps=statistics.fmean(steps) if steps else None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """The episodes of an evaluation, in order of their numbers."""

    episodes: tuple[EpisodeResult, ...]

    @property
    def overall(self) -> Rate:
        """The rate over all episodes."""
        return rate(self.episodes)

    @property
    def by_task(self) -> dict[str, Rate]:
        """The rate per task, in order of appearance."""
        names = dict.fromkeys(episode.task for episode in self.episodes)
        return {name: rate([episode for episode in self.episodes if episode.task == name]) for name in names}

    def as_json(self) -> dict[str, Any]:
        """All results, for `closed_loop.json`."""
        return {
            "overall": self.overall.as_json(),
            "tasks": {name: one.as_json() for name, one in self.by_task.items()},
            "episodes": [dataclasses.asdict(episode) for episode in self.episodes],
        }

    def metrics(self) -> dict[str, float]:
        """`success/all`, the ends of its interval, and `success/<task>` for every task."""
        low, high = self.overall.interval
        tasks = {f"success/{name}": one.share for name, one in self.by_task.items()}
        return {"success/all": self.overall.share, "success/all_low": low, "success/all_high": high, **tasks}

    def table(self) -> str:
        """A line per task and one for all: successes, trials, rate with its interval, steps until success."""
        rows = {**self.by_task, "all": self.overall}
        width = max(len(name) for name in (*rows, "task"))
        lines = [f"{'task':<{width}}  success          95 % interval   steps"]
        for name, one in rows.items():
            low, high = one.interval
            steps = "-" if one.mean_steps is None else f"{one.mean_steps:.0f}"
            counts = f"{one.successes}/{one.trials}"
            lines.append(f"{name:<{width}}  {counts:>7} {one.share:>6.1%}  {low:>6.1%} - {high:>6.1%}  {steps:>6}")
        return "\n".join(lines)
