"""Conversion of a dataset to another format: the interface between sources and writers.

Read next: `make/convert.py`, which makes a `Conversion`, and `lerobot/to_lerobot.py`, `rlds/to_rlds.py`,
`zarr/to_zarr.py`, which write it.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np

from openpi_train.data.core import image
from openpi_train.data.core.source import About, Source

Pictures = Literal["av1", "h264", "png", "jpeg", "as-stored"]
# Number of frames decoded at a time.
_AT_ONCE = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversion:
    """A source, and the parts of it that are written.

    Attributes:
        about: The new dataset's description.
        columns: The columns to write, by name.
        pictures: Encoding of the pictures; "as-stored" copies the source's bytes.
    """

    source: Source
    about: About
    columns: Mapping[str, np.ndarray]
    pictures: Pictures

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """Height and width of each camera's pictures, taken from the first step."""
        first = np.zeros(1, np.int64)
        sizes = {camera: self.source.frames(first, camera).shape[1:3] for camera in self.source.cameras}
        return {camera: (int(height), int(width)) for camera, (height, width) in sizes.items()}

    def episodes(self, first: int = 0) -> Iterator[range]:
        """The steps of each episode, from episode `first` on."""
        yield from map(self.source.steps_of, range(first, self.source.num_episodes))

    def prompts(self, steps: range) -> list[str]:
        """The instruction at each of an episode's steps."""
        numbers = self.source.prompt_index[steps.start : steps.stop].tolist()
        return [str(self.source.prompts[number]) for number in numbers]

    def frames(self, steps: range, camera: str) -> Iterator[np.ndarray]:
        """An episode's frames, one by one, uint8 [height, width, 3]."""
        for first in range(steps.start, steps.stop, _AT_ONCE):
            yield from self.source.frames(np.arange(first, min(first + _AT_ONCE, steps.stop)), camera)

    def encoded(self, steps: range, camera: str) -> Iterator[bytes]:
        """An episode's pictures as PNG or JPEG, or as the source stores them."""
        if self.pictures == "as-stored":
            yield from (self.source.encoded(step, camera) for step in steps)
        else:
            kind = "jpeg" if self.pictures == "jpeg" else "png"
            yield from (image.encode(frame, kind) for frame in self.frames(steps, camera))


def stores_pictures(source: Source) -> bool:
    """Whether the source stores encoded pictures that can be copied unchanged."""
    try:
        for camera in source.cameras:
            source.encoded(0, camera)
    except ValueError:
        return False
    return bool(source.cameras)


class WithPictures(Source):
    """A source whose pictures are encoded as the conversion says; the input of `repack`."""

    def __init__(self, conversion: Conversion):
        source = conversion.source
        self._conversion, self._source = conversion, source
        self.columns = conversion.columns
        for name in ("fingerprint", "episode_ends", "episode_ids", "prompts", "prompt_index", "cameras"):
            setattr(self, name, getattr(source, name))

    def frames(self, steps: np.ndarray, camera: str) -> np.ndarray:
        return self._source.frames(steps, camera)

    def encoded(self, step: int, camera: str) -> bytes:
        return next(self._conversion.encoded(range(step, step + 1), camera))

    def about(self) -> About:
        return self._conversion.about

    def describe(self, step: int) -> str:
        return self._source.describe(step)
