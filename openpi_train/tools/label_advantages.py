"""`data advantages`: which steps of stored episodes were better than a value function expects.

It reads the datasets of the value function's run, and writes a file for each beside them
(`data/robot/advantage_file.py`). Read next: `rl/stored_advantages.py`; `policy/values.py`.
"""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from openpi_train.data.robot.advantage_file import write_advantages
from openpi_train.data.robot.labels import ALL, boolean_feature
from openpi_train.data.robot.opened import open_windows
from openpi_train.data.robot.windows import Windows
from openpi_train.objectives.return_distribution import ReturnDistribution
from openpi_train.policy.loading import load_policy
from openpi_train.policy.restore import open_run
from openpi_train.policy.values import Values
from openpi_train.rl.stored_advantages import Better, better_steps, lookahead_advantages
from openpi_train.runtime.exits import UsageError
from openpi_train.tools.open_loop import observation_at

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Judged:
    """A dataset's values, advantages and indicator, and the file that holds them."""

    path: Path
    windows: Windows
    values: np.ndarray
    advantages: np.ndarray
    better: Better

    @property
    def tasks(self) -> np.ndarray:
        """The instruction of each step."""
        return _tasks(self.windows)

    def lines(self) -> list[str]:
        """By task the share of better steps; the correlation of value and return in each split."""
        found = [f"{self.path}: {len(self.values)} control steps"]
        for task, threshold in self.better.thresholds.items():
            share = self.better.is_better[self.tasks == task].mean()
            found.append(
                f"  {task!r}: {100 * share:.1f} % of steps are better, with an advantage above {threshold:.4f}"
            )
        for split, windows in (("training", self.windows), ("held-out", self.windows.in_split("validation"))):
            steps = windows.starts
            found.append(
                f"  correlation of value and return in {split} episodes: "
                f"{correlation(self.values[steps], self.windows.label[steps])} ({len(steps)} control steps)"
            )
        return found


def correlation(one: np.ndarray, other: np.ndarray) -> str:
    """Pearson's, in words where there is none."""
    if len(one) < 2 or one.std() == 0 or other.std() == 0:
        return "none, as one of them does not vary"
    return f"{np.corrcoef(one, other)[0, 1]:.3f}"


def judge(
    run: Path, out: Path, *, lookahead: int | None, share: float, always: str | None, batch_size: int
) -> list[Judged]:
    """Write the advantages of the run's datasets below `out`, `<asset id>.parquet` each.

    Datasets all of whose episodes succeed (`success` "all") are demonstrations, which need no file.

    Args: as the flags of `data advantages`.

    Raises UsageError if the run is no value function's, or has nothing but demonstrations.
    """
    stored, experiment = open_run(run)
    if not isinstance(experiment.objective, ReturnDistribution):
        raise UsageError(
            f"{run} was trained by {type(experiment.objective).__name__}, and values come from a value function: train "
            "one with ReturnDistribution, as fetch_reach_value"
        )
    config = experiment.demonstrations
    chosen = [number for number, dataset in enumerate(config.datasets) if dataset.success != ALL]
    if not chosen:
        raise UsageError(
            f"{run}: all its datasets have --data.datasets.N.success all: demonstrations need no advantages"
        )
    names = [config.datasets[number].asset for number in chosen]
    if len(set(names)) < len(names):
        names = [f"{number}_{name}" for number, name in zip(chosen, names, strict=True)]
    windows = open_windows(config, experiment.policy.rows.window)
    some = [windows[number] for number in chosen]
    values = []
    for number, name in zip(chosen, names, strict=True):
        loaded = load_policy(
            run, experiment=None if stored.experiment else experiment, dataset=number, num_sample_steps=1
        )
        values.append(_values(Values(loaded, batch_size), windows[number], name))
    advantages = [
        lookahead_advantages(one.label, seen, np.asarray(one.source.episode_ends), lookahead)
        for one, seen in zip(some, values, strict=True)
    ]
    marked = [
        np.zeros(one.source.num_steps, bool) if always is None else boolean_feature(one.source, always, "--always")
        for one in some
    ]
    better = better_steps(advantages, [_tasks(one) for one in some], marked, share)
    found = []
    for place, name in enumerate(names):
        path, one, marks = out / f"{name}.parquet", some[place], better[place]
        write_advantages(path, one.source, one.label, values[place], advantages[place], marks.is_better)
        found.append(Judged(path, one, values[place], advantages[place], marks))
    return found


def _tasks(windows: Windows) -> np.ndarray:
    if windows.prompt is not None:
        return np.full(windows.source.num_steps, windows.prompt)
    return np.asarray([str(text) for text in windows.source.prompts])[np.asarray(windows.prompt_index)]


def _values(values: Values, windows: Windows, name: str) -> np.ndarray:
    found, count = [], windows.source.num_steps
    every = values.size * max(1, 20_000 // values.size)
    for start in range(0, count, values.size):
        steps: Sequence[int] = range(start, min(start + values.size, count))
        found.append(values([observation_at(windows, step) for step in steps]))
        if start and start % every == 0:
            logger.info("%s: %d of %d control steps", name, start, count)
    return np.concatenate(found)
