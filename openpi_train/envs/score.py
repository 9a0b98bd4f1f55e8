"""How often a policy succeeds, per task and over all, with an interval that says how sure that is.

Read next: `closed_loop.py`, which counts.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any


def wilson(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """The interval in which the probability of success lies, with this confidence (Wilson 1927); (0, 1) for no trial.

    It stays within [0, 1] and is honest for few trials and for none or all succeeding, where p +- z s is not.

    Raises ValueError where the counts or the confidence cannot be.
    """
    if not 0 <= successes <= trials or not 0 < confidence < 1:
        raise ValueError(f"{successes} successes of {trials} trials with confidence {confidence} cannot be")
    if trials == 0:
        return 0.0, 1.0
    from scipy import stats  # half a second, for who asks

    interval = stats.binomtest(successes, trials).proportion_ci(confidence, method="wilson")
    return float(interval.low), float(interval.high)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpisodeResult:
    """How one episode ended: `steps` are the control steps until success, all of them where there was none."""

    number: int
    task: str
    success: bool
    steps: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rate:
    """Successes among trials; `mean_steps` are control steps until success, None where there was none."""

    successes: int
    trials: int
    mean_steps: float | None

    @property
    def share(self) -> float:
        """Successes per trial."""
        return self.successes / self.trials

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's, with 95 % confidence."""
        return wilson(self.successes, self.trials)

    def as_json(self) -> dict[str, Any]:
        """Counts, share and interval."""
        low, high = self.interval
        return {**dataclasses.asdict(self), "rate": self.share, "low": low, "high": high}


def rate(episodes: Sequence[EpisodeResult]) -> Rate:
    """The rate over these episodes, of which there is at least one."""
    steps = [episode.steps for episode in episodes if episode.success]
    return Rate(successes=len(steps), trials=len(episodes), mean_steps=statistics.fmean(steps) if steps else None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """The episodes of an evaluation, by number."""

    episodes: tuple[EpisodeResult, ...]

    @property
    def overall(self) -> Rate:
        """Over all episodes."""
        return rate(self.episodes)

    @property
    def by_task(self) -> dict[str, Rate]:
        """Per task, in the order in which they come."""
        names = dict.fromkeys(episode.task for episode in self.episodes)
        return {name: rate([episode for episode in self.episodes if episode.task == name]) for name in names}

    def as_json(self) -> dict[str, Any]:
        """Everything, for `closed_loop.json`."""
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
        """A line per task and one for all: successes, trials, share with its interval, steps until success."""
        rows = {**self.by_task, "all": self.overall}
        width = max(len(name) for name in (*rows, "task"))
        lines = [f"{'task':<{width}}  success          95 % interval   steps"]
        for name, one in rows.items():
            low, high = one.interval
            steps = "-" if one.mean_steps is None else f"{one.mean_steps:.0f}"
            counts = f"{one.successes}/{one.trials}"
            lines.append(f"{name:<{width}}  {counts:>7} {one.share:>6.1%}  {low:>6.1%} - {high:>6.1%}  {steps:>6}")
        return "\n".join(lines)
