"""The training samples of one dataset: an observation history and the action chunk that followed, by sample number.

A sample is a control step of the split's episodes that may start a window. No window crosses an episode: history
repeats the episode's first observation, the action chunk its last action (masked). Read next: `rows.py`.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from openpi_train.data.source import Source
from openpi_train.robots.base import Robot, Steps

Split = Literal["train", "validation"]


def validation_episodes(episode_ids: Sequence[str] | np.ndarray, fraction: float) -> np.ndarray:
    """Which episodes are held out, bool [episodes]: a function of each episode's own content.

    So equal episodes land on the same side, and appending data moves no earlier episode (but for the exception: where
    the hash would hold out nothing or everything, one distinct episode is held out or kept).
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"validation_fraction {fraction} must be in [0, 1)")
    scores = {name: _score(name) for name in set(episode_ids)}
    held_out = {name for name, score in scores.items() if score < fraction}
    if fraction > 0 and len(scores) > 1:
        if not held_out:
            held_out = {min(scores, key=scores.__getitem__)}
        elif len(held_out) == len(scores):
            held_out.remove(max(scores, key=scores.__getitem__))
    elif len(scores) == 1:
        held_out = set()
    return np.array([name in held_out for name in episode_ids], bool)


def _score(name: str) -> float:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) / 2**64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Windows:
    """The samples of one dataset in one split, numbered 0..len-1 in the order of their control steps.

    Args: `horizon` is the number of actions in a chunk, `history` that of observations (1: the present one alone);
    `prompt` replaces the dataset's instructions where given.

    Raises ValueError where the robot asks for columns or cameras that the dataset does not have.
    """

    source: Source
    robot: Robot
    horizon: int
    history: int = 1
    split: Split = "train"
    validation_fraction: float = 0.0
    prompt: str | None = None

    def __post_init__(self):
        if self.horizon < 1 or self.history < 1:
            raise ValueError(f"horizon {self.horizon} and history {self.history} must be at least 1")
        for slot, feature in self.robot.cameras.items():
            if feature not in self.source.cameras:
                flag = f"--data.datasets.N.robot.cameras.{slot.replace('_', '-')}"
                raise ValueError(
                    f"the robot's camera {slot} reads the image feature {feature!r}, which the dataset lacks; "
                    f"it has {', '.join(self.source.cameras) or 'no images'}: set {flag}"
                )

    def __getstate__(self) -> dict[str, Any]:
        # Data workers read the (memory-mapped) columns again: cheaper than shipping copies of them.
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        len(self)  # now, before a worker's threads would all read the columns at once

    def __len__(self) -> int:
        return len(self.starts)

    @functools.cached_property
    def steps(self) -> Steps:
        """The whole dataset in the robot's units."""
        steps = self.robot.read(self.source.columns, self.source.episode_ends)
        widths = {"state": len(self.robot.state_names), "actions": len(self.robot.action_names)}
        for name, width in widths.items():
            if getattr(steps, name).shape != (self.source.num_steps, width):
                raise ValueError(
                    f"{type(self.robot).__name__}.read gave {name} of shape {getattr(steps, name).shape} for "
                    f"{self.source.num_steps} steps and {width} named dims"
                )
        return steps

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """The control step at which each sample starts, int64 [samples]."""
        held_out = validation_episodes(self.source.episode_ids, self.validation_fraction)
        mine = held_out if self.split == "validation" else ~held_out
        lengths = np.diff(self.source.episode_ends, prepend=0)
        return np.flatnonzero(np.repeat(mine, lengths) & self.steps.use)

    def in_split(self, split: Split) -> "Windows":
        """The same dataset's windows of the other split; the columns are read once."""
        other = dataclasses.replace(self, split=split)
        other.__dict__["steps"] = self.steps
        return other

    def bounds(self, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The first step and the step after the last one of the episodes that hold `steps`."""
        ends = np.asarray(self.source.episode_ends)
        episode = np.searchsorted(ends, steps, side="right")
        return np.where(episode > 0, ends[episode - 1], 0), ends[episode]

    def chunks(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Present states [n, s], action chunks [n, h, a] in the model's units, and which actions are real [n, h]."""
        start = self.starts[samples]
        end = self.bounds(start)[1][:, None]
        ahead = start[:, None] + np.arange(self.horizon)
        state, actions = self.robot.to_model(self.steps.state[start], self.steps.actions[np.minimum(ahead, end - 1)])
        assert actions is not None
        return state, actions, ahead < end

    def row(self, sample: int) -> dict[str, Any]:
        """One sample in the model's units, not yet normalised.

        Returns: `image/<slot>` uint8 [(o,) height, width, 3], `image_mask/<slot>` (always True), `state` [(o,) s],
        `actions` [h, a], `action_mask` [h] and `prompt`; the axis o is there when `history` > 1. Raises BadRecord.
        """
        step = int(self.starts[sample])
        _, actions, action_mask = self.chunks(np.array([sample]))
        behind = np.arange(step - self.history + 1, step + 1)
        behind = np.maximum(behind, self.bounds(np.array([step]))[0])
        past = behind if self.history > 1 else step
        row: dict[str, Any] = {}
        for slot, feature in self.robot.cameras.items():
            frames = self.source.frames(behind, feature)
            row[f"image/{slot}"] = frames if self.history > 1 else frames[0]
            row[f"image_mask/{slot}"] = np.True_
        row["state"] = self.robot.to_model(self.steps.state[past])[0]
        row["actions"], row["action_mask"] = actions[0], action_mask[0]
        row["prompt"] = self.prompt_at(step)
        return row

    def prompt_at(self, step: int) -> str:
        """The instruction that holds at a control step."""
        return self.source.prompts[int(self.source.prompt_index[step])] if self.prompt is None else self.prompt

    @property
    def prompts(self) -> Sequence[str]:
        """The distinct instructions of the dataset."""
        return self.source.prompts if self.prompt is None else [self.prompt]

    def prompt_numbers(self, samples: np.ndarray) -> np.ndarray:
        """Which of `prompts` each sample has, int [n]."""
        if self.prompt is not None:
            return np.zeros(len(samples), np.int32)
        return self.source.prompt_index[self.starts[samples]]

    def describe(self, sample: int) -> str:
        """Where a sample lies: file, record, episode, step."""
        return self.source.describe(int(self.starts[sample]))
