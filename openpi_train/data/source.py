"""What every dataset format promises: episodes, columns, and frames by random access.

Read next: `rlds/rlds_source.py` (the native format), `windows.py` (rows out of a source).
"""

import abc
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from openpi_train.runtime.exits import DataError

logger = logging.getLogger(__name__)

# A wider column is an embedding rather than a state: at 512 floats a step it would outweigh all the rest of an index.
WIDEST_COLUMN = 256


class BadRecord(DataError):
    """A record that cannot be read. The message names file, record and episode; raised when the step is touched."""


@dataclasses.dataclass(frozen=True)
class About:
    """What a dataset says of itself beside its numbers; what its format has no place for is absent.

    Attributes:
        control_hz: Control steps per second.
        dim_names: By column, a name for each of its numbers.
        left_out: What the dataset has and the source has not, each with the reason.
        robot_type: The robot's name.
    """

    control_hz: float | None = None
    dim_names: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    robot_type: str | None = None

    def as_json(self) -> dict[str, Any]:
        """What a format of ours keeps: all but what is left out."""
        names = {column: list(names) for column, names in self.dim_names.items()}
        return {"control_hz": self.control_hz, "dim_names": names, "robot_type": self.robot_type}

    @classmethod
    def from_json(cls, kept: Mapping[str, Any], left_out: Mapping[str, str] | None = None) -> "About":
        """What `as_json` gave."""
        names = {column: tuple(names) for column, names in kept.get("dim_names", {}).items()}
        return cls(kept.get("control_hz"), names, dict(left_out or {}), kept.get("robot_type"))


class Source(abc.ABC):
    """An opened dataset. Steps are numbered 0..num_steps-1, episode after episode, in an order that never changes.

    Reading one step never costs reading an episode. Instances are picklable (data workers receive them): file handles
    open lazily, per process.
    """

    # sha256 hex digest that changes whenever the data does; part of every cached result's name.
    fingerprint: str
    # int64 [episodes]: the step after each episode's last one (cumulative lengths).
    episode_ends: np.ndarray
    # One string per episode, a digest of the episode's content: equal episodes have equal ids wherever they lie.
    episode_ids: Sequence[str]
    # Low-dimensional columns by name (`observation/state`, `action`, ...), each [num_steps, ...], memory-mapped.
    columns: Mapping[str, np.ndarray]
    # The language instructions, distinct texts.
    prompts: Sequence[str]
    # For every step, which of the instructions (int32 [num_steps]).
    prompt_index: np.ndarray
    # Names of the image features, e.g. ("observation/image_0",).
    cameras: tuple[str, ...]
    # Episodes that could not be read and are left out.
    num_dropped: int = 0

    @property
    def num_steps(self) -> int:
        """Control steps in the dataset."""
        return int(self.episode_ends[-1]) if len(self.episode_ends) else 0

    @property
    def num_episodes(self) -> int:
        """Episodes in the dataset."""
        return len(self.episode_ends)

    def episode_of(self, step: int) -> int:
        """The episode that a step belongs to."""
        return int(np.searchsorted(self.episode_ends, step, side="right"))

    def steps_of(self, episode: int) -> range:
        """The steps of an episode."""
        return range(int(self.episode_ends[episode - 1]) if episode else 0, int(self.episode_ends[episode]))

    def place_of(self, step: int) -> str:
        """A step's episode and its place in that, for messages."""
        episode = self.episode_of(step)
        steps = self.steps_of(episode)
        return f"episode {episode}, step {steps.index(step)} of {len(steps)}"

    @abc.abstractmethod
    def frames(self, steps: np.ndarray, camera: str) -> np.ndarray:
        """The camera's frames at these steps, uint8 [len(steps), height, width, 3].

        Raises BadRecord where a frame cannot be read or decoded, KeyError for an unknown camera.
        """

    def encoded(self, step: int, camera: str) -> bytes:
        """The camera's picture at one step as the dataset stores it (JPEG or PNG bytes), not decoded.

        Raises BadRecord as `frames` does, and ValueError where the format does not store pictures one by one.
        """
        raise ValueError(f"{type(self).__name__} does not store encoded pictures, so it cannot be repacked")

    def about(self) -> About:
        """What the dataset says of itself, read from its metadata at every call."""
        return About()

    @abc.abstractmethod
    def describe(self, step: int) -> str:
        """Where a step lies, for messages: file, record number, episode and step in it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceConfig(abc.ABC):
    """Where a dataset lies and how to open it. A value on the command line (`--data.datasets.0.source.path`)."""

    @abc.abstractmethod
    def open(self) -> Source:
        """Open the dataset, building its index first where that is missing or stale.

        Raises FileNotFoundError or ValueError with what to do.
        """

    @property
    def location(self) -> str:
        """The path of its files, the field `path`; empty where there is none."""
        return str(getattr(self, "path", ""))

    def is_ready(self) -> bool:
        """Whether `open` finds all that it needs, or first has to read the dataset for minutes or hours.

        Raises FileNotFoundError or ValueError with what to do, as `open` does, from metadata alone.
        """
        return True

    def skipping_bad_records(self) -> "SourceConfig":
        """The same, leaving out the bad records that are found at opening."""
        return self

    def column_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each column, per step. Formats whose metadata say so do not open the dataset for it.

        Raises as `open` does.
        """
        return {name: column.shape[1:] for name, column in self.open().columns.items()}


def stored_name(name: str) -> str:
    """The name of a column or camera in formats without slashes: what `column_name` takes back."""
    return name.replace("/", ".")


def column_name(stored: str) -> str:
    """A feature's name as robots know it: `observation.state` of a format without slashes is `observation/state`."""
    return stored.replace(".", "/")


def report_dropped(dataset: str, dropped: Sequence[tuple[int, str]], on_bad_record: Literal["error", "skip"]) -> None:
    """Say which episodes an index left out: how many, and where and why. Raises BadRecord where none may be."""
    if not dropped:
        return
    summary = f"{sum(episodes for episodes, _ in dropped)} episodes of {dataset} cannot be read"
    lines = [line for _, line in dropped[:10]]
    shown = "\n  ".join([*lines, *(["..."] if len(dropped) > 10 else [])])
    if on_bad_record == "error":
        raise BadRecord(
            f"{summary}:\n  {shown}\n"
            "Fetch these files again, or leave the episodes out with --data.on-bad-record skip "
            "(of the `data` verb: --on-bad-record skip)"
        )
    logger.warning("%s and are left out:\n  %s", summary, shown)
