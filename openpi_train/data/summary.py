"""Summary of a dataset: episodes, the range of every dim, and checks of its cameras. Read next: `source.py`.

Extremes, constants and non-finite values come from whole columns, quantiles from evenly spread steps; cameras are
checked on a few pictures.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from openpi_train.data.source import BadRecord, Source

QUANTILES = (0.01, 0.5, 0.99)
_MOST_STEPS = 200_000
# A picture whose brightest pixel is below this counts as black: video codecs do not keep exact zeros.
BLACK = 16


@dataclasses.dataclass(frozen=True)
class Dim:
    """One dim of a column: its name, extremes, `QUANTILES`, and what is wrong with it ("" if nothing)."""

    name: str
    low: float
    high: float
    quantiles: tuple[float, ...]
    flag: str


@dataclasses.dataclass(frozen=True)
class CameraSummary:
    """Checks of a camera on `looked_at` of its pictures.

    Attributes:
        size: Height and width; None if no picture could be read.
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
        """A text on what is wrong with the camera; empty if nothing."""
        found = []
        if self.bad:
            found.append(f"{self.bad} of {self.looked_at} cannot be read")
        if self.black:
            found.append("black" if self.black == self.looked_at else f"{self.black} of {self.looked_at} black")
        elif self.still and self.bad < self.looked_at:
            found.append("never changes")
        return ", ".join(found)


def dims(name: str, column: np.ndarray, names: Sequence[str] = ()) -> list[Dim]:
    """Summary of every dim of a column [n, ...]; `names` are the dims' names, if known."""
    wide = column.reshape(len(column), -1)
    steps = np.unique(np.linspace(0, len(wide) - 1, min(len(wide), _MOST_STEPS)).astype(np.int64))
    found = []
    for number in range(wide.shape[1]):
        label = names[number] if len(names) == wide.shape[1] else name if column.ndim == 1 else f"{name}[{number}]"
        values = np.asarray(wide[:, number], np.float64)
        finite = values[np.isfinite(values)]
        if not len(finite):
            found.append(Dim(label, np.nan, np.nan, (np.nan,) * len(QUANTILES), "no finite value"))
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
    """Checks of every camera on `per_episode` steps of these episodes."""
    return [_camera(source, camera, episodes, per_episode) for camera in source.cameras]


def spread(source: Source, episode: int, number: int) -> np.ndarray:
    """At most `number` steps of an episode, evenly spread from its first to its last."""
    steps = source.steps_of(episode)
    return np.unique(np.linspace(steps[0], steps[-1], number).round().astype(np.int64))


def some_episodes(source: Source, number: int) -> list[int]:
    """At most `number` episodes, evenly spread over the dataset."""
    return np.unique(np.linspace(0, source.num_episodes - 1, number).round().astype(int)).tolist()


def steps_of_prompts(source: Source) -> Mapping[str, int]:
    """Number of steps of each instruction, the most frequent first."""
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
            black += int(frame.max() < BLACK)
            still &= before is None or np.array_equal(frame, before)
            before = frame
    return CameraSummary(
        camera, looked_at, size, float(np.mean(brightness)) if brightness else np.nan, black, bad, bool(still)
    )
