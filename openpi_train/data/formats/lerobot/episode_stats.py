"""Statistics of LeRobot episodes and datasets, as the format stores them.

Read next: `lerobot_writer.py`. Same rules as lerobot 0.4.4 (`datasets/compute_stats.py`): quantiles come from a
histogram of 5000 bins between an episode's extremes; a dataset's quantiles are the episodes' means weighted by their
steps; pictures are sampled and downsampled, and counted by frames. One difference: lerobot squares pictures in 8 bits,
so its standard deviations of pictures are wrong (often 0); here they are correct, as in its format 2.1.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
_BINS = 5000
# Minimum number of pictures sampled per episode (all of a shorter one), and maximum.
_FEWEST_PICTURES, _MOST_PICTURES = 100, 10_000
# A picture whose longer side exceeds the first is downsampled to about the second.
_LARGE, _THINNED = 300, 150

# Arrays of the same shape by statistic, and `count`.
Stats = dict[str, np.ndarray]


def of_column(values: np.ndarray) -> Stats:
    """The statistics of a column [n, ...], each [...] (for single numbers [1])."""
    values = values[:, None] if values.ndim == 1 else values
    wide = values.reshape(len(values), -1)
    shape = values.shape[1:]
    exact = wide.astype(np.float64)
    quantiles = np.array([_quantiles(dim, np.ones(len(dim))) for dim in exact.T]).reshape(*shape, -1)
    return {
        "min": wide.min(axis=0).reshape(shape),
        "max": wide.max(axis=0).reshape(shape),
        "mean": exact.mean(axis=0).reshape(shape),
        "std": exact.std(axis=0).reshape(shape),
        "count": np.array([len(values)]),
        **{name: quantiles[..., number] for number, name in enumerate(QUANTILES)},
    }


class PictureStats:
    """Accumulates the statistics of an episode's pictures; `num_frames` is their total number."""

    def __init__(self, num_frames: int):
        fewest = min(num_frames, _FEWEST_PICTURES)
        wanted = max(fewest, min(int(num_frames**0.75), _MOST_PICTURES))
        self._wanted = set(np.round(np.linspace(0, num_frames - 1, wanted)).astype(int).tolist())
        self._seen = 0
        self._counts = np.zeros((3, 256), np.int64)

    def add(self, picture: np.ndarray) -> None:
        """Add the next picture, uint8 [height, width, 3]."""
        if self._seen in self._wanted:
            longer = max(picture.shape[:2])
            thin = longer // _THINNED if longer >= _LARGE else 1
            for channel in range(3):
                self._counts[channel] += np.bincount(picture[::thin, ::thin, channel].reshape(-1), minlength=256)
        self._seen += 1

    def result(self) -> Stats:
        """The statistics of all pictures, in 0..1, each [3, 1, 1]."""
        levels = np.arange(256) / 255
        share = self._counts / self._counts.sum(axis=1, keepdims=True)
        mean = share @ levels
        present = [np.flatnonzero(counts) for counts in self._counts]
        quantiles = [_quantiles(np.arange(256.0)[at], self._counts[number, at]) for number, at in enumerate(present)]
        found = {
            "min": np.array([levels[at[0]] for at in present]),
            "max": np.array([levels[at[-1]] for at in present]),
            "mean": mean,
            "std": np.sqrt(np.maximum(share @ levels**2 - mean**2, 0)),
            "count": np.array([len(self._wanted)]),
            **{name: np.array(quantiles)[:, number] / 255 for number, name in enumerate(QUANTILES)},
        }
        return {name: value if name == "count" else value.reshape(3, 1, 1) for name, value in found.items()}


def of_all(episodes: Sequence[Mapping[str, Stats]]) -> dict[str, Stats]:
    """A dataset's statistics, from those of its episodes by feature."""
    return {name: _joined([episode[name] for episode in episodes]) for name in episodes[0]}


def as_json(stats: Mapping[str, Stats], *, quantiles: bool) -> dict[str, dict[str, Any]]:
    """The statistics as lists, by feature and name; format 2.1 has no quantiles."""
    return {
        name: {key: value.tolist() for key, value in entry.items() if quantiles or key not in QUANTILES}
        for name, entry in stats.items()
    }


def from_json(stats: Mapping[str, Mapping[str, object]]) -> dict[str, Stats]:
    """The inverse of `as_json`."""
    return {name: {key: np.array(value) for key, value in entry.items()} for name, entry in stats.items()}


def _joined(parts: Sequence[Stats]) -> Stats:
    counts = np.concatenate([part["count"] for part in parts])
    share = counts / counts.sum()

    def mean(values: np.ndarray) -> np.ndarray:
        return np.tensordot(share, values, 1)

    def stacked(name: str) -> np.ndarray:
        return np.stack([part[name] for part in parts])

    means = stacked("mean")
    total = mean(means)
    return {
        "min": stacked("min").min(axis=0),
        "max": stacked("max").max(axis=0),
        "mean": total,
        "std": np.sqrt(mean(stacked("std") ** 2 + (means - total) ** 2)),
        "count": np.array([counts.sum()]),
        **{name: mean(stacked(name)) for name in QUANTILES if name in parts[0]},
    }


def _quantiles(values: np.ndarray, weights: np.ndarray) -> list[float]:
    """Quantiles interpolated in a histogram of the values, each counted `weights` times."""
    low, high = float(values.min()), float(values.max())
    if low == high:
        return [low] * len(QUANTILES)
    histogram, edges = np.histogram(values, _BINS, (low, high), weights=weights)
    reached = np.cumsum(histogram)
    found = []
    for quantile in QUANTILES.values():
        wanted = quantile * reached[-1]
        bin_ = min(int(np.searchsorted(reached, wanted)), _BINS - 1)
        before = reached[bin_] - histogram[bin_]
        # lerobot does not interpolate in the first bin.
        part = 0.0 if bin_ == 0 or not histogram[bin_] else (wanted - before) / histogram[bin_]
        found.append(float(edges[bin_] + part * (edges[bin_ + 1] - edges[bin_])))
    return found
