"""Training samples of one dataset, by number: an observation history and the action chunk that followed.

A sample is a control step of the split's episodes at which a window may be placed. Windows do not cross episodes:
before its beginning the first observation and action repeat, after its end the last action (masked). With `only` a
chunk does not leave the steps that a feature marks either, such as a person's corrections. Read next: `rows.py`.
"""

import dataclasses
import difflib
import functools
from collections.abc import Callable, Container, Sequence
from typing import Any, Literal

import numpy as np

from openpi_train.data.core.held_out import validation_episodes
from openpi_train.data.core.instructions import filled, is_blank, unlabeled_episodes
from openpi_train.data.core.source import Source
from openpi_train.data.robot.labels import Labels, boolean_feature
from openpi_train.robots.robot import Robot, Steps

Split = Literal["train", "validation"]

_ONLY = "--data.datasets.N.only"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowShape:
    """What a model sees and predicts: `history` observations up to and including the present control step, and a chunk
    of `horizon` actions that starts `first_action` steps from it (0: at the present step).

    Diffusion policy's chunk begins with the first observation: `first_action` is 1 - history. Its sampler
    (`common/sampler.py` of real-stanford/diffusion_policy) places a chunk up to `pad_before` steps before an episode's
    beginning and up to `pad_after` beyond its end, so an episode of n steps has max(0, n - horizon + 1 + pad_before +
    pad_after) windows. By default every step of an episode is the present step of one window.

    `execute` is how many actions from the present step on are executed before the next chunk is asked for; None: half
    of them, as in openpi's examples (5 of 10 in LIBERO, 25 of 50 on ALOHA).

    Raises ValueError if the present step could lie outside the episode, or more is executed than there is.
    """

    horizon: int
    history: int = 1
    first_action: int = 0
    pad_before: int | None = None
    pad_after: int | None = None
    execute: int | None = None

    def __post_init__(self):
        if self.horizon < 1 or self.history < 1:
            raise ValueError(f"horizon {self.horizon} and history {self.history} must be at least 1")
        if not -self.horizon < self.first_action <= 0:
            raise ValueError(
                f"first_action {self.first_action} must be in {1 - self.horizon}..0: a chunk includes the present step"
            )
        for name, most in (("pad_before", -self.first_action), ("pad_after", self.horizon - 1 + self.first_action)):
            given = getattr(self, name)
            if given is None:
                object.__setattr__(self, name, most)
            elif not 0 <= given <= most:
                raise ValueError(f"{name} {given} must be in 0..{most}, so that the present step is inside the episode")
        if self.execute is not None and not 1 <= self.execute <= self.num_ahead:
            raise ValueError(
                f"execute {self.execute} must be in 1..{self.num_ahead}, the actions that a chunk has ahead"
            )

    @property
    def num_ahead(self) -> int:
        """Number of actions in a chunk from the present step on."""
        return self.horizon + self.first_action

    @property
    def num_executed(self) -> int:
        """`execute` with its default filled in: what every closed loop executes that is not told another number."""
        return max(1, self.num_ahead // 2) if self.execute is None else self.execute

    def places(self, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The first present step in episodes of these lengths, and the step after the last one."""
        assert self.pad_before is not None and self.pad_after is not None
        first = np.full_like(lengths, -self.pad_before - self.first_action)
        return first, lengths - self.horizon + 1 + self.pad_after - self.first_action


def require_cameras(
    robot: Robot, cameras: Sequence[str], left_out: Callable[[Container[str]], str] = lambda wanted: ""
) -> None:
    """Raise ValueError if a dataset with these image features lacks one of the robot's; `left_out` may say why."""
    for slot, feature in robot.cameras.items():
        if feature not in cameras:
            others = [one for one in cameras if one not in robot.cameras.values()] or list(cameras)
            (near, *_) = [*difflib.get_close_matches(feature, others, n=1), *others, "FEATURE"]
            flag = f"--data.datasets.N.robot.cameras.{slot.replace('_', '-')} {near}"
            raise ValueError(
                f"the robot's camera {slot} reads the image feature {feature!r}, which the dataset does not have; "
                f"it has {', '.join(cameras) or 'no images'}: set {flag}{left_out([feature])}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Windows:
    """The samples of one dataset in one split, numbered 0..len-1 in the order of their control steps.

    Args: `shape` is what the model sees and predicts; `prompt`, if given, replaces the dataset's instructions;
    `held_out`, if given, is the validation split, in place of a fraction of the dataset; `skip_unlabeled` leaves out
    episodes without an instruction, and gives blank steps of others that of a step beside them (None: as the robot);
    `only` names a boolean feature: windows are placed at steps where it is true, and their chunks end where it ends;
    `labels`, if given, says what else is learned of each step (`labels.py`).

    Raises ValueError if the robot asks for columns or cameras that the dataset does not have, if `only` is no boolean
    feature, or if no episode has an instruction and those without are to be left out.
    """

    source: Source
    robot: Robot
    shape: WindowShape
    split: Split = "train"
    validation_fraction: float = 0.0
    prompt: str | None = None
    held_out: Source | None = None
    skip_unlabeled: bool | None = None
    only: str | None = None
    labels: Labels | None = None

    def __post_init__(self):
        require_cameras(self.robot, self.source.cameras, self._left_out)
        if self.only is not None:
            _require_marks(self.source, self.only)
        if self.labels is not None:
            _ = self.label
        if self.source.num_episodes and self.unlabeled.all():
            why = (
                f"the robot is a {type(self.robot).__name__}" if self.skip_unlabeled is None else "skip_unlabeled is on"
            )
            raise ValueError(
                f"no episode of the dataset has an instruction ({self.source.describe(0)}), and those without are left "
                f"out because {why}: give one for all with --data.datasets.N.prompt, name their feature (RLDS: "
                "--data.datasets.N.source.prompt-feature), or train without: --data.datasets.N.skip-unlabeled False"
            )

    def _left_out(self, wanted: Container[str]) -> str:
        """Sentences on those of the wanted columns and cameras that the dataset has but its source leaves out."""
        found = {name: why for name, why in self.source.about().left_out.items() if name in wanted}
        return "".join(f". {name} is left out: {why}" for name, why in found.items())

    def __getstate__(self) -> dict[str, Any]:
        # Data workers read the (memory-mapped) columns again, which is cheaper than copying them.
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        len(self)  # now, before a worker's threads would all read the columns at once

    def __len__(self) -> int:
        return len(self.starts)

    @functools.cached_property
    def steps(self) -> Steps:
        """The whole dataset in the robot's units."""
        try:
            steps = self.robot.read(self.source.columns, self.source.episode_ends)
        except ValueError as error:
            raise ValueError(f"{error}{self._left_out(str(error))}") from error
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
        """The present control step of each sample, int64 [samples]."""
        labeled = np.flatnonzero(~self.unlabeled)
        # Of those that are read, so that none of the splits is empty.
        held_out = validation_episodes(np.asarray(self.source.episode_ids)[labeled], self.validation_fraction)
        mine = np.zeros(self.source.num_episodes, bool)
        mine[labeled[held_out if self.split == "validation" else ~held_out]] = True
        lengths = np.diff(self.source.episode_ends, prepend=0)
        first, end = (np.repeat(bound, lengths) for bound in self.shape.places(lengths))
        place = np.arange(self.source.num_steps) - np.repeat(self.source.episode_ends - lengths, lengths)
        use = self.steps.use if self.only is None else self.steps.use & self._marks
        return np.flatnonzero(np.repeat(mine, lengths) & use & (first <= place) & (place < end))

    @functools.cached_property
    def _marks(self) -> np.ndarray:
        """The steps where the feature `only` is true, bool [steps]."""
        assert self.only is not None
        return boolean_feature(self.source, self.only, _ONLY)

    @functools.cached_property
    def label(self) -> np.ndarray:
        """The label of each step, float32 [steps]. Raises ValueError if the dataset does not say it."""
        assert self.labels is not None
        return self.labels.of(self.source, self.prompt)

    @functools.cached_property
    def _run_ends(self) -> np.ndarray:
        """The steps after which an episode ends, or `only` becomes true or false: cumulative lengths, as
        `Source.episode_ends`."""
        return np.union1d(self.source.episode_ends, np.flatnonzero(np.diff(self._marks)) + 1)

    @functools.cached_property
    def unlabeled(self) -> np.ndarray:
        """The episodes that are left out as they have no instruction, bool [episodes]."""
        if not self._skips or not any(map(is_blank, self.source.prompts)):
            return np.zeros(self.source.num_episodes, bool)
        return unlabeled_episodes(self.source.prompts, self.source.prompt_index, self.source.episode_ends)

    @functools.cached_property
    def prompt_index(self) -> np.ndarray:
        """Index into the source's `prompts` of every step, int32 [steps]."""
        if not self._skips or not any(map(is_blank, self.source.prompts)):
            return self.source.prompt_index
        return filled(self.source.prompts, self.source.prompt_index, self.source.episode_ends)

    @property
    def _skips(self) -> bool:
        """Whether unlabelled episodes are left out; a `prompt` is the label of all."""
        return self.prompt is None and (
            self.robot.skip_unlabeled if self.skip_unlabeled is None else self.skip_unlabeled
        )

    @property
    def num_blank(self) -> int:
        """Samples with a blank instruction."""
        blank = np.array([is_blank(text) for text in self.prompts], bool)
        return int(blank[self.prompt_numbers(np.arange(len(self)))].sum())

    def in_split(self, split: Split) -> "Windows":
        """The same dataset's windows of another split; the columns are not read again."""
        if split == "validation" and self.held_out is not None:
            # All of its episodes.
            return dataclasses.replace(self, source=self.held_out, held_out=None, validation_fraction=0.0)
        other = dataclasses.replace(self, split=split)
        other.__dict__["steps"] = self.steps
        return other

    def bounds(self, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The first step and the step after the last one of the episodes that hold `steps`."""
        return _bounds(np.asarray(self.source.episode_ends), steps)

    def chunk_bounds(self, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As `bounds`, of what a chunk at each of `steps` may hold: with `only`, its run of marked steps."""
        return _bounds(np.asarray(self.source.episode_ends) if self.only is None else self._run_ends, steps)

    def chunks(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Present states [n, s], action chunks [n, h, a] in the model's units, and a mask of real actions [n, h]."""
        present = self.starts[samples]
        first, end = (bound[:, None] for bound in self.chunk_bounds(present))
        chunk = present[:, None] + self.shape.first_action + np.arange(self.shape.horizon)
        inside = np.clip(chunk, first, end - 1)
        state, actions = self.robot.to_model(self.steps.state[present], self.steps.actions[inside])
        assert actions is not None
        return state, actions, chunk == inside

    def row(self, sample: int) -> dict[str, Any]:
        """One sample in the model's units, not yet normalised.

        Returns: `image/<slot>` uint8 [(o,) height, width, 3], `image_mask/<slot>` (always True), `state` [(o,) s],
        `actions` [h, a], `action_mask` [h] and `prompt`, with `labels` also `label`; the axis o exists only if the
        history is longer than 1. Raises BadRecord.
        """
        step = int(self.starts[sample])
        _, actions, action_mask = self.chunks(np.array([sample]))
        behind = np.arange(step - self.shape.history + 1, step + 1)
        behind = np.maximum(behind, self.bounds(np.array([step]))[0])
        past = slice(None) if self.shape.history > 1 else 0
        images = {slot: self.source.frames(behind, name)[past] for slot, name in self.robot.cameras.items()}
        row = self.robot.row(images, self.steps.state[behind][past], self.prompt_at(step))
        row = row | {"actions": actions[0], "action_mask": action_mask[0]}
        return row if self.labels is None else row | {"label": self.label[step]}

    def prompt_at(self, step: int) -> str:
        """The instruction at a control step."""
        return self.source.prompts[int(self.prompt_index[step])] if self.prompt is None else self.prompt

    @property
    def prompts(self) -> Sequence[str]:
        """The distinct instructions of the dataset."""
        return self.source.prompts if self.prompt is None else [self.prompt]

    def prompt_numbers(self, samples: np.ndarray) -> np.ndarray:
        """Index into `prompts` of each sample, int [n]."""
        if self.prompt is not None:
            return np.zeros(len(samples), np.int32)
        return self.prompt_index[self.starts[samples]]

    def describe(self, sample: int) -> str:
        """Where a sample is stored: file, record, episode, step."""
        return self.source.describe(int(self.starts[sample]))


def _bounds(ends: np.ndarray, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first step and the step after the last one of the runs of steps with these ends that hold `steps`."""
    run = np.searchsorted(ends, steps, side="right")
    return np.where(run > 0, ends[run - 1], 0), ends[run]


def _require_marks(source: Source, name: str) -> None:
    """Raise ValueError if the source has no boolean feature of this name, or if it is true at no step."""
    if not boolean_feature(source, name, _ONLY).any():
        raise ValueError(f"{_ONLY} {name}: the feature is true at no step of the dataset, so there is nothing to learn")
