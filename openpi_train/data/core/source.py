"""Interface of all dataset formats: episodes, columns, and frames by random access.

Read next: `formats/rlds/rlds_source.py` (the native format), `robot/windows.py` (rows out of a source).
"""

import abc
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from openpi_train.data.core.findings import Finding
from openpi_train.json_object import JsonObject
from openpi_train.runtime.exits import DataError

logger = logging.getLogger(__name__)

# Columns of time stamps, by the last part of their names.
_TIMES = ("timestamp", "timestamps", "time")
# A wider column is an embedding, not a state: with 512 floats per step it would outweigh the rest of an index.
WIDEST_COLUMN = 256


class BadRecord(DataError):
    """A record that cannot be read; raised when its step is read. The message names file, record and episode."""


@dataclasses.dataclass(frozen=True)
class About:
    """A dataset's description of itself; entries that its format does not store are absent.

    Attributes:
        control_hz: Control steps per second.
        dim_names: By column, the name of each of its dims.
        left_out: Items of the dataset that the source does not provide, each with the reason.
        robot_type: The robot's name.
    """

    control_hz: float | None = None
    dim_names: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    robot_type: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The JSON that our own formats store: everything except `left_out`."""
        names = {column: list(names) for column, names in self.dim_names.items()}
        return {"control_hz": self.control_hz, "dim_names": names, "robot_type": self.robot_type}

    @classmethod
    def from_json(cls, kept: JsonObject, left_out: Mapping[str, str] | None = None) -> "About":
        """The inverse of `as_json`."""
        names = {column: tuple(names) for column, names in kept.get("dim_names", {}).items()}
        return cls(kept.get("control_hz"), names, dict(left_out or {}), kept.get("robot_type"))


class Source(abc.ABC):
    """An opened dataset. Steps are numbered 0..num_steps-1, episode after episode, in a fixed order.

    A step can be read without reading its whole episode. Instances are picklable, because data workers receive them:
    file handles are opened lazily, per process.
    """

    # sha256 hex digest of the data; part of every cached result's name.
    fingerprint: str
    # int64 [episodes]: the step after each episode's last one (cumulative lengths).
    episode_ends: np.ndarray
    # One string per episode, a digest of its content: equal episodes have equal ids wherever they are stored.
    episode_ids: Sequence[str]
    # Low-dimensional columns by name (`observation/state`, `action`, ...), each [num_steps, ...], memory-mapped.
    columns: Mapping[str, np.ndarray]
    # The language instructions, distinct texts.
    prompts: Sequence[str]
    # Index into `prompts` for every step, int32 [num_steps].
    prompt_index: np.ndarray
    # Names of the image features, e.g. ("observation/image_0",).
    cameras: tuple[str, ...]
    # Episodes that could not be read and are left out.
    num_dropped: int = 0
    # What is suspicious in the dataset, as far as opening it shows.
    findings: Sequence[Finding] = ()

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
        """A step's episode and its position in it, for messages."""
        episode = self.episode_of(step)
        steps = self.steps_of(episode)
        return f"episode {episode}, step {steps.index(step)} of {len(steps)}"

    @abc.abstractmethod
    def frames(self, steps: np.ndarray, camera: str) -> np.ndarray:
        """The camera's frames at these steps, uint8 [len(steps), height, width, 3].

        Raises BadRecord if a frame cannot be read or decoded, KeyError for an unknown camera.
        """

    def encoded(self, step: int, camera: str) -> bytes:
        """The camera's picture at one step as the dataset stores it (JPEG or PNG bytes), not decoded.

        Raises BadRecord as `frames` does, and ValueError if the format does not store pictures one by one.
        """
        raise ValueError(f"{type(self).__name__} does not store encoded pictures, so it cannot be repacked")

    def about(self) -> About:
        """The dataset's description, read from its metadata at every call."""
        return About()

    @property
    def recorded_hz(self) -> float | None:
        """The control rate that the dataset says; None if it says none."""
        return self.about().control_hz

    def times(self, first: int, end: int) -> np.ndarray | None:
        """The recorded time stamps of the steps `first` up to `end`, whole episodes, in the dataset's unit.

        None if it has none. Raises OSError or ValueError if they cannot be read.
        """
        for name, column in self.columns.items():
            if name.rpartition("/")[2] in _TIMES and column.size == len(column):
                return np.asarray(column[first:end]).reshape(-1)
        return None

    @abc.abstractmethod
    def describe(self, step: int) -> str:
        """Where a step is stored, for messages: file, record number, episode and step in it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceConfig(abc.ABC):
    """Where a dataset is and how to open it. Settable on the command line (`--data.datasets.0.source.path`)."""

    # Whether `column_shapes` reads metadata alone.
    shapes_in_metadata: ClassVar[bool] = False

    @abc.abstractmethod
    def open(self) -> Source:
        """Open the dataset, building its index first if that is missing or stale.

        Raises FileNotFoundError or ValueError that says what to do.
        """

    @property
    def location(self) -> str:
        """The field `path` of the dataset's files; empty if there is none."""
        return str(getattr(self, "path", ""))

    def is_ready(self) -> bool:
        """Whether `open` can start at once, without first reading the dataset for minutes or hours.

        Reads metadata alone. Raises FileNotFoundError or ValueError as `open` does.
        """
        return True

    def skipping_bad_records(self) -> "SourceConfig":
        """The same config, with bad records found at opening left out."""
        return self

    def column_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each column, per step. Formats whose metadata hold the shapes do not open the dataset.

        Raises as `open` does.
        """
        return {name: column.shape[1:] for name, column in self.open().columns.items()}

    def num_steps_in_metadata(self) -> int | None:
        """The control steps of the dataset, without opening it; None if its metadata do not say.

        Raises OSError or ValueError if they cannot be read.
        """
        return None


def stored_name(name: str) -> str:
    """The name of a column or camera in formats without slashes; the inverse of `column_name`."""
    return name.replace("/", ".")


def column_name(stored: str) -> str:
    """A feature's name as robots use it: `observation.state` in a format without slashes is `observation/state`."""
    return stored.replace(".", "/")


def report_dropped(dataset: str, dropped: Sequence[tuple[int, str]], on_bad_record: Literal["error", "skip"]) -> None:
    """Log the episodes that an index left out, and why. Raises BadRecord if `on_bad_record` is "error"."""
    if not dropped:
        return
    summary = f"{sum(episodes for episodes, _ in dropped)} episodes of {dataset} cannot be read"
    lines = [line for _, line in dropped[:10]]
    shown = "\n  ".join([*lines, *(["..."] if len(dropped) > 10 else [])])
    if on_bad_record == "error":
        raise BadRecord(
            f"{summary}:\n  {shown}\n"
            "Put whole copies of these files in their place, or leave the episodes out with "
            "--data.on-bad-record skip "
            "(for the `data` verb: --on-bad-record skip)"
        )
    logger.warning("%s and are left out:\n  %s", summary, shown)
