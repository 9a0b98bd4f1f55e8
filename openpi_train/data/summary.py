"""A dataset in numbers: episodes, the range of every dimension, and what its cameras show. Read next: `source.py`.

Columns are looked at whole for constants and holes, for quantiles at steps spread evenly; of pictures a few are.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from openpi_train.data.source import BadRecord, Source

QUANTILES = (0.01, 0.5, 0.99)
_MOST_STEPS = 200_000
# A picture whose brightest pixel is below this is black: video codecs do not keep exact zeros.
_BLACK = 16


@dataclasses.dataclass(frozen=True)
class Dim:
    """One number of a column: its name, extremes, `QUANTILES`, and what is wrong with it ("" where nothing is)."""

    name: str
    low: float
    high: float
    quantiles: tuple[float, ...]
    flag: str


@dataclasses.dataclass(frozen=True)
class CameraSummary:
    """A camera in `looked_at` of its pictures.

    Attributes:
        size: Height and width; None where no picture could be read.
        brightness: Mean over pixels, 0..255.
        black, bad: How many of the pictures were black, or could not be read.
        still: Whether no picture differs from the one before it in its episode.
    """

    name: str
    looked_at: int
    size: tuple[int, int] | None
    brightness: float
    black: int
    bad: int
    still: bool

    @property
    def flag(self) -> str:
        """What is wrong with it, in words."""
        found = []
        if self.bad:
            found.append(f"{self.bad} of {self.looked_at} cannot be read")
        if self.black:
            found.append("black" if self.black == self.looked_at else f"{self.black} of {self.looked_at} black")
        elif self.still and self.bad < self.looked_at:
            found.append("never changes")
        return ", ".join(found)


def dims(name: str, column: np.ndarray, names: Sequence[str] = ()) -> list[Dim]:
    """Every number of a column [n, ...]; `names` of them where they have some."""
    wide = column.reshape(len(column), -1)
    steps = np.unique(np.linspace(0, len(wide) - 1, min(len(wide), _MOST_STEPS)).astype(np.int64))
    found = []
    for number in range(wide.shape[1]):
        label = names[number] if len(names) == wide.shape[1] else name if column.ndim == 1 else f"{name}[{number}]"
        values = np.asarray(wide[:, number], np.float64)
        finite = values[np.isfinite(values)]
        if not len(finite):
            found.append(Dim(label, np.nan, np.nan, (np.nan,) * len(QUANTILES), "not one finite number"))
            continue
        seen = values[steps]
        seen = seen[np.isfinite(seen)]
        low, high = float(finite.min()), float(finite.max())
        quantiles = np.quantile(seen if len(seen) else finite, QUANTILES).tolist()
        flags = [f"{len(values) - len(finite)} not finite"] if len(finite) < len(values) else []
        if low == high:
            flags.append("constant")
        found.append(Dim(label, low, high, tuple(quantiles), ", ".join(flags)))
    return found


def cameras(source: Source, episodes: Sequence[int], per_episode: int) -> list[CameraSummary]:
    """What every camera shows in so many steps of these episodes."""
    return [_camera(source, camera, episodes, per_episode) for camera in source.cameras]


def spread(source: Source, episode: int, number: int) -> np.ndarray:
    """Steps of an episode from its first to its last, at most so many."""
    steps = source.steps_of(episode)
    return np.unique(np.linspace(steps[0], steps[-1], number).round().astype(np.int64))


def some_episodes(source: Source, number: int) -> list[int]:
    """Episodes spread over the dataset, at most so many."""
    return np.unique(np.linspace(0, source.num_episodes - 1, number).round().astype(int)).tolist()


def steps_of_prompts(source: Source) -> Mapping[str, int]:
    """Every instruction with how many steps it is given at, the most frequent first."""
    counts = np.bincount(source.prompt_index, minlength=len(source.prompts))
    return {str(source.prompts[number]): int(counts[number]) for number in np.argsort(-counts, kind="stable")}


def _camera(source: Source, camera: str, episodes: Sequence[int], per_episode: int) -> CameraSummary:
    looked_at = black = bad = 0
    still, size, brightness = True, None, []
    for episode in episodes:
        before = None
        for step in spread(source, episode, per_episode):
            looked_at += 1
            try:
                frame = source.frames(step[None], camera)[0]
            except BadRecord:
                bad += 1
                continue
            size = (frame.shape[0], frame.shape[1])
            brightness.append(float(frame.mean()))
            black += int(frame.max() < _BLACK)
            still &= before is None or np.array_equal(frame, before)
            before = frame
    return CameraSummary(
        camera, looked_at, size, float(np.mean(brightness)) if brightness else np.nan, black, bad, bool(still)
    )
