"""What else is learned of each control step of stored episodes: its return, or whether it was better than expected.

For RECAP (Physical Intelligence 2025, "pi*0.6: a VLA that learns from experience"): a value function learns the returns
(`objectives/return_distribution.py`), and a policy is told which steps were better than the value function expected
(`objectives/advantage_conditioned_flow.py`). Read next: `advantage_file.py`; `windows.py`, which labels rows.
"""

import abc
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from openpi_train.data.core.source import Source, column_name, stored_name
from openpi_train.data.robot.advantage_file import digest, read_indicator
from openpi_train.json_object import JsonObject

# Values of an indicator, as `sampling/indicator.py` has them.
BETTER, WORSE = 1, 2
# What a dataset says of its steps' results, in LeRobot's names (`next.success`).
_SUCCESS, _REWARD = "next/success", "next/reward"
# In place of a feature: all episodes succeeded.
ALL = "all"


class Labels(abc.ABC):
    """The label of each step of a dataset."""

    @abc.abstractmethod
    def of(self, source: Source, prompt: str | None) -> np.ndarray:
        """The labels, float32 [steps]; `prompt`, if given, is the task of all episodes.

        Raises ValueError if the dataset does not say them.
        """

    @abc.abstractmethod
    def identity(self) -> JsonObject:
        """What they depend on besides the dataset."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Returns(Labels):
    """The return of each step: minus the control steps until the episode's end, of those that fail minus more.

    A step costs 1 and a failure `failure_cost` times the task's longest episode; the sum is divided by the most that
    it can be, so that returns lie in (-1, 0] for every task. The last step of an episode that succeeds has 0.

    Attributes:
        success: the feature that says which episodes succeed, as in `episode_successes`.
        failure_cost: what a failure costs.
        longest: the control steps of the longest episode of each task, by instruction.
    """

    success: str | None
    failure_cost: float
    longest: Mapping[str, int]

    def of(self, source: Source, prompt: str | None) -> np.ndarray:
        ends = np.asarray(source.episode_ends)
        lengths = np.diff(ends, prepend=0)
        limits = np.array([self.longest[task] for task in episode_tasks(source, prompt)])
        failures = ~episode_successes(source, self.success)
        to_go = np.repeat(ends, lengths) - 1 - np.arange(source.num_steps)
        costs = to_go + np.repeat(failures * self.failure_cost * limits, lengths)
        return (-costs / np.repeat((1 + self.failure_cost) * limits, lengths)).astype(np.float32)

    def identity(self) -> JsonObject:
        return {"success": self.success, "failure_cost": self.failure_cost, "longest": dict(self.longest)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Indicator(Labels):
    """Whether each step was better than expected.

    Attributes:
        file: where `data advantages` has said so; None: all steps were, as of demonstrations.
    """

    file: str | None

    def of(self, source: Source, prompt: str | None) -> np.ndarray:
        del prompt
        if self.file is None:
            return np.full(source.num_steps, BETTER, np.float32)
        return np.where(read_indicator(self.file, source.fingerprint), BETTER, WORSE).astype(np.float32)

    def identity(self) -> JsonObject:
        return {"advantages": None if self.file is None else digest(self.file)}


def episode_tasks(source: Source, prompt: str | None = None) -> list[str]:
    """The task of each episode: `prompt`, or its first step's instruction."""
    if prompt is not None:
        return [prompt] * source.num_episodes
    firsts = np.asarray(source.episode_ends) - np.diff(source.episode_ends, prepend=0)
    return [str(source.prompts[number]) for number in np.asarray(source.prompt_index)[firsts].tolist()]


def longest_episodes(sources: Sequence[tuple[Source, str | None]]) -> dict[str, int]:
    """The control steps of the longest episode of each task in these datasets, each with its `prompt`."""
    longest: dict[str, int] = {}
    for source, prompt in sources:
        lengths = np.diff(source.episode_ends, prepend=0).tolist()
        for task, length in zip(episode_tasks(source, prompt), lengths, strict=True):
            longest[task] = max(longest.get(task, 0), length)
    return dict(sorted(longest.items()))


def episode_successes(source: Source, feature: str | None) -> np.ndarray:
    """Which episodes succeed, bool [episodes]: those where the feature is true at any step.

    `feature` None: `next.success`, or without that, a `next.reward` above 0 at the last step. "all": all of them.

    Raises ValueError if there is no such feature, or it is no boolean.
    """
    ends = np.asarray(source.episode_ends)
    if feature == ALL:
        return np.ones(len(ends), bool)
    if feature is None and _SUCCESS not in source.columns and _REWARD in source.columns:
        return np.asarray(source.columns[_REWARD]).reshape(source.num_steps, -1)[ends - 1, 0] > 0
    marks = boolean_feature(source, feature or stored_name(_SUCCESS), "--data.datasets.N.success")
    totals = np.concatenate([[0], np.cumsum(marks)])
    return np.diff(totals[ends], prepend=0) > 0


def boolean_feature(source: Source, name: str, flag: str) -> np.ndarray:
    """A feature with one boolean, or 0 or 1, per step, bool [steps]; its name may have dots, as LeRobot writes it.

    Raises ValueError, with the flag that names it.
    """
    key = name if name in source.columns else column_name(name)
    if key not in source.columns:
        found = sorted(one for one, column in source.columns.items() if column.dtype == bool)
        raise ValueError(
            f"{flag} {name}: the dataset has no such feature; its boolean ones are {', '.join(found) or '(none)'}"
        )
    column = source.columns[key]
    if column.size != source.num_steps:
        raise ValueError(f"{flag} {name}: the feature has {list(column.shape[1:])} values per step, not one boolean")
    if column.dtype != bool and not np.isin(column, (0, 1)).all():
        raise ValueError(f"{flag} {name}: the feature is {column.dtype} with other values than 0 and 1, not a boolean")
    return np.asarray(column, bool).reshape(-1)
