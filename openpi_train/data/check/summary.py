"""Summary of a dataset: episodes, the range of every dim, size and brightness of its cameras. Read next:
`core/source.py`.

Extremes come from whole columns, quantiles from evenly spread steps; cameras are looked at in a few pictures. What is
suspicious is found by `check/`.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from openpi_train.data.core.source import BadRecord, Source

QUANTILES = (0.01, 0.5, 0.99)
_MOST_STEPS = 200_000


@dataclasses.dataclass(frozen=True)
class Dim:
    """One dim of a column: its name, extremes and `QUANTILES` of finite values; NaN if there is none."""

    name: str
    low: float
    high: float
    quantiles: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class CameraSummary:
    """A camera by some of its pictures: height and width, None if none could be read; mean brightness, 0..255."""

    name: str
    size: tuple[int, int] | None
    brightness: float


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
            found.append(Dim(label, np.nan, np.nan, (np.nan,) * len(QUANTILES)))
            continue
        seen = values[steps]
        seen = seen[np.isfinite(seen)]
        low, high = float(finite.min()), float(finite.max())
        quantiles = np.quantile(seen if len(seen) else finite, QUANTILES).tolist()
        found.append(Dim(label, low, high, tuple(quantiles)))
    return found


def cameras(source: Source, episodes: Sequence[int], per_episode: int) -> list[CameraSummary]:
    """Every camera by the pictures at `per_episode` steps of these episodes."""
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
    return {str(source.prompts[number]): int(counts[number]) for number in np.argsort(-counts, kind="stable").tolist()}


def _camera(source: Source, camera: str, episodes: Sequence[int], per_episode: int) -> CameraSummary:
    size, brightness = None, []
    for episode in episodes:
        for step in spread(source, episode, per_episode):
            try:
                frame = source.frames(step[None], camera)[0]
            except BadRecord:
                continue
            size = (frame.shape[0], frame.shape[1])
            brightness.append(float(frame.mean()))
    return CameraSummary(camera, size, float(np.mean(brightness)) if brightness else np.nan)
