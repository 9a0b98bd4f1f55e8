"""What every dataset format promises: episodes, columns, and frames by random access.

Read next: `rlds/source.py` (the native format), `windows.py` (rows out of a source).
"""

import abc
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from openpi_train.runtime.exits import DataError


class BadRecord(DataError):
    """A record that cannot be read. The message names file, record and episode; raised when the step is touched."""


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
    # The language instructions: distinct texts, and for every step which one (int32 [num_steps]).
    prompts: Sequence[str]
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
