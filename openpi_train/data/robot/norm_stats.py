"""Computation of norm stats from columns alone: no image is decoded, so all of BridgeData takes minutes.

Two passes over the training windows, in blocks: sums, extremes and a coarse count of values, then centred squares (so
that mean and std are exact) and a fine count where the quantiles are (so that they are). `Asset` caches the result.
Read next: `normalize.py` for the guard.
"""

import dataclasses
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.data.core import files, order
from openpi_train.data.core.findings import Finding, report
from openpi_train.data.core.progress import Progress
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.data.robot.normalize import FILE_NAME, NormStats, guard, read_norm_stats, write_norm_stats
from openpi_train.data.robot.spikes import find_spikes
from openpi_train.data.robot.windows import Windows

logger = logging.getLogger(__name__)

# Increase it when the computation changes, so that cached stats are computed again.
_VERSION = 2
_HALF = 1 << 16
# Share of the values at each end that may be spikes; in small datasets that of two samples, up to the second.
_OUTERMOST, _MOST_OUTERMOST = 5e-4, 9e-3
_BLOCK_VALUES = 1 << 21
_MOST_FOR_MEAN = 100_000
# Files beside openpi's: what it was computed from, and a copy of it if somebody edited it.
_DETAILS, _EDITED = "norm_stats.details.json", "norm_stats.edited.json"

# Stats by array, and notes by array and dim on what was widened.
Noted = tuple[dict[str, NormStats], dict[str, dict[str, str]]]
# The weight of one row, and a function that yields blocks [rows, dims] (it is called twice).
Stream = tuple[float, Callable[[], Iterable[np.ndarray]]]


def summarize(streams: Sequence[Stream], outermost: float = _OUTERMOST) -> NormStats:
    """Weighted statistics of all rows: population std; quantiles exact in float32.

    A quantile is the smallest value whose cumulative weight reaches the given share. It is found in two steps, whatever
    the range: numbers are counted by the upper half of their float32 bits, then those of the half that holds the
    quantile by the lower one.

    Args: `outermost` is the share of the values at each end that `most_low` and `most_high` leave out.
    """
    count, total, low, high = 0.0, 0.0, np.array(np.inf), np.array(-np.inf)
    levels = np.array([outermost, 0.01, 0.99, 1 - outermost])
    upper: Any = 0.0
    for weight, blocks in streams:
        counted: Any = 0
        for block in blocks():
            count += weight * len(block)
            total += weight * block.sum(axis=0, dtype=np.float64)
            low, high = np.minimum(low, block.min(axis=0)), np.maximum(high, block.max(axis=0))
            counted = counted + _histogram(_halves(block)[..., 1])
        upper = upper + weight * counted
    if not count:
        raise ValueError("norm stats of no data: the training split has no samples")
    if not np.isfinite(total).all():
        raise ValueError(f"the columns hold NaN or infinity in dims {np.flatnonzero(~np.isfinite(total)).tolist()}")
    low, high, mean = low.astype(np.float64), high.astype(np.float64), np.asarray(total) / count
    # Shares below each half, and the halves that hold the quantiles, [levels, dims].
    share = np.cumsum(upper, axis=1) / count
    halves = np.stack([_reached(share, level) for level in levels])
    below = np.take_along_axis(share - upper / count, halves.T, axis=1).T
    squares, lower = np.zeros_like(mean), np.zeros((len(levels), len(mean), _HALF))
    for weight, blocks in streams:
        counts = [np.zeros((len(mean), _HALF), np.int64) for _ in levels]
        for block in blocks():
            squares += weight * np.square(block - mean).sum(axis=0)
            parts = _halves(block)
            for number, half in enumerate(halves):
                rows, dims = np.nonzero(parts[..., 1] == half)
                np.add.at(counts[number], (dims, parts[rows, dims, 0]), 1)
        lower += weight * np.stack(counts)
    found = [
        _number(_reached(start[:, None] + np.cumsum(within, axis=1) / count, level), half)
        for half, start, within, level in zip(halves, below, lower, levels, strict=True)
    ]
    # Values that float32 does not have are rounded there, and must not leave the range.
    most_low, q01, q99, most_high = (np.clip(value, low, high) for value in found)
    return NormStats(
        mean=mean, std=np.sqrt(squares / count), q01=q01, q99=q99, low=low, high=high,
        most_low=most_low, most_high=most_high,
    )  # fmt: skip


def _halves(values: np.ndarray) -> np.ndarray:
    """The lower and the upper half of each number's float32 bits, in the order of the numbers, uint16 [..., 2]."""
    with np.errstate(over="ignore"):
        bits = (values.astype(np.float32, order="C") + np.float32(0)).view(np.uint32)  # -0 becomes 0
    # Negative numbers inverted, others behind them.
    bits ^= -(bits >> 31) | np.uint32(1 << 31)
    return bits.astype("<u4", copy=False).view("<u2").reshape(*values.shape, 2)


def _number(lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """The inverse of `_halves`, float64."""
    bits = ((upper << 16) | lower).astype(np.uint32)
    return np.where(bits >> 31, bits ^ np.uint32(1 << 31), ~bits).astype(np.uint32).view(np.float32).astype(np.float64)


def _histogram(halves: np.ndarray) -> np.ndarray:
    """How often each half occurs in each dim, int64 [dims, 65536]; `halves` uint16 [rows, dims]."""
    dims = halves.shape[1]
    return np.bincount((halves + np.arange(dims) * _HALF).ravel(), minlength=dims * _HALF).reshape(dims, _HALF)


def _reached(share: np.ndarray, level: float) -> np.ndarray:
    """The first place of each dim where the cumulative share reaches the level, int64 [dims]."""
    # The tolerance is for rounding: a share of exactly the level must count as reached.
    return np.argmax(share >= level - 1e-12, axis=1)


def compute_norm_stats(windows: Sequence[Windows], weights: Sequence[float], max_samples: int) -> Noted:
    """Statistics of `state` and `actions` over the samples of datasets that share them, with the mixture's weights.

    Actions are counted over whole chunks, as the model sees them, without the padding at an episode's end. At most
    `max_samples` samples of a dataset are used, evenly spread. Degenerate dims are widened (see `guard`).

    Returns: the stats, and notes per array and dim name on what was widened.
    """
    raw: dict[str, NormStats] = {}
    outermost = _outermost([len(_chosen(len(window), max_samples)) for window in windows], weights)
    for name, walk in (("state", _states), ("actions", _actions)):
        streams: list[Stream] = []
        for window, weight in zip(windows, weights, strict=True):
            chosen = _chosen(len(window), max_samples)
            streams.append((weight / max(1, len(chosen)), lambda walk=walk, w=window, c=chosen: walk(w, c)))
        try:
            raw[name] = summarize(streams, outermost)
        except ValueError as error:
            raise ValueError(f"{name}: {error}{_first_not_finite(windows, name)}") from error
    robot = windows[0].robot
    names = {"state": robot.state_names, "actions": robot.action_names}
    guarded = {name: guard(stats, names[name]) for name, stats in raw.items()}
    return {name: stats for name, (stats, _) in guarded.items()}, {name: notes for name, (_, notes) in guarded.items()}


def mean_action(window: Windows) -> np.ndarray:
    """The mean of the action chunks of these windows in the model's units, without padding, float64 [a].

    Of large datasets 100,000 samples are used, evenly spread. Raises ValueError if there are none.
    """
    total, count = np.zeros(len(window.robot.action_names)), 0
    for block in _actions(window, _chosen(len(window), _MOST_FOR_MEAN)):
        total, count = total + block.sum(axis=0, dtype=np.float64), count + len(block)
    if not count:
        raise ValueError("the training split has no samples, so its actions have no mean")
    return total / count


def _outermost(sizes: Sequence[int], weights: Sequence[float]) -> float:
    """The share of values at each end that may be spikes: two samples' of each dataset, or 1 in 2000."""
    largest = max(2 * weight / max(1, size) for size, weight in zip(sizes, weights, strict=True)) / sum(weights)
    return min(max(_OUTERMOST, largest), _MOST_OUTERMOST)


def _first_not_finite(windows: Sequence[Windows], name: str) -> str:
    """Sentences on the first NaN or infinity of `state` or `actions` and what to do; empty if there is none."""
    for window in windows:
        bad = np.flatnonzero(~np.isfinite(getattr(window.steps, name)).all(axis=1))
        if len(bad):
            return (
                f"; {len(bad)} of {window.source.num_steps} control steps have some, the first is "
                f"{window.source.describe(int(bad[0]))}. Repair or remove these episodes, or train around them with "
                "--data.datasets.N.norm-stats of the sound ones and --on-nan skip"
            )
    return ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asset:
    """Datasets that share norm stats: read from the file `given`, or else computed and cached in `folder`.

    At most `max_samples` samples of each dataset are used.
    """

    name: str
    windows: Sequence[Windows]
    weights: Sequence[float]
    folder: Path
    max_samples: int
    given: str | None = None

    @property
    def dims(self) -> dict[str, tuple[str, ...]]:
        """The names of each array's dims."""
        robot = self.windows[0].robot
        return {"state": robot.state_names, "actions": robot.action_names}

    def stats(self) -> dict[str, NormStats]:
        """The stats, computed and written if they are not known. A warning names degenerate dims.

        All processes may call it at the same time: all write the same bytes, atomically. Raises as `known`, and OSError
        if the stats cannot be written.
        """
        known = self.known()
        if known is None:
            started = time.monotonic()
            logger.info("norm stats: computing from %d samples (columns only)", sum(map(len, self.windows)))
            known = self.compute()
            try:
                self.store(known)
            except OSError as error:
                raise OSError(
                    f"norm stats cannot be written to {self.folder} ({error}); choose another --assets-base-dir"
                ) from error
            logger.info("norm stats: wrote %s after %.1f s", self.folder / FILE_NAME, time.monotonic() - started)
        elif self.given is None:
            logger.info("norm stats: using %s", self.folder / FILE_NAME)
        stats, notes = known
        report(self.name, self.spikes(stats))
        for array, dims in notes.items():
            if dims:
                listed = ", ".join(f"{dim} ({text})" for dim, text in dims.items())
                label = "norm stats of %s: nearly constant or seldom moving dims of %s: %s"
                logger.warning(label, self.name, array, listed)
        return stats

    def compute(self) -> Noted:
        """The stats of these data, and notes on what was widened."""
        return compute_norm_stats(self.windows, self.weights, self.max_samples)

    def spikes(self, stats: Mapping[str, NormStats]) -> list[Finding]:
        """The spikes of these data, whose stats these are; those that `store` has written are not sought again."""
        if self.given is not None:
            return []
        stored = self._details()
        if stored is not None and stored["fingerprint"] == self._fingerprint():
            return [Finding.from_json(one) for one in stored["spikes"]]
        return [
            finding
            for name in ("state", "actions")
            for window in self.windows
            for finding in find_spikes(
                window,
                _blocks(window, _chosen(len(window), self.max_samples), window.shape.horizon),
                name,
                self.dims[name],
                stats[name],
            )
        ]

    def known(self) -> Noted | None:
        """The given stats, or those cached in the folder; None if the folder has none for these data.

        Raises FileNotFoundError or ValueError if a given file is missing, invalid, or does not fit the robot.
        """
        return self._kept() if self.given is None else self._given(self.given)

    def store(self, computed: Noted) -> None:
        """Write the result of `compute`, with the fingerprint of what it was computed from."""
        stats, notes = computed
        extremes = {name: [entry.low, entry.high] for name, entry in stats.items()}
        spikes = [finding.as_json() for finding in self.spikes(stats)]
        written = write_norm_stats(self.folder, stats).read_bytes()
        details = {"fingerprint": self._fingerprint(), "extremes": extremes, "notes": notes, "sha256": _sha256(written)}
        details["spikes"] = spikes
        # Written last: a folder without it, or with an older one, counts as not computed.
        files.write_text(self.folder / _DETAILS, json.dumps(details, indent=2, default=np.ndarray.tolist))

    def _given(self, given: str) -> Noted:
        stats, notes, loaded = {}, {}, read_norm_stats(given)
        for name, dims in self.dims.items():
            if name not in loaded:
                raise ValueError(f"norm stats {given} hold no {name!r}, only {sorted(loaded)}")
            try:
                stats[name], notes[name] = guard(loaded[name], dims)
            except ValueError as error:
                raise ValueError(f"{given}, {name}: {error}; omit --data.datasets.N.norm-stats") from error
        return stats, notes

    def _kept(self) -> Noted | None:
        kept, details = self.folder / FILE_NAME, self._details()
        if details is None or not kept.is_file():
            return None
        if details["fingerprint"] != self._fingerprint():
            logger.info("norm stats: the data or its settings changed since %s was written", kept)
            return None
        if details["sha256"] != _sha256(kept.read_bytes()):
            edited = shutil.copy2(kept, self.folder / _EDITED)
            logger.warning(
                "norm stats: %s was edited since it was computed; kept as %s and computed again "
                "(--data.datasets.N.norm-stats %s uses it unchanged)", kept, _EDITED, edited,
            )  # fmt: skip
            return None
        bounds = {name: [np.asarray(bound) for bound in pair] for name, pair in details["extremes"].items()}
        stats = {
            name: dataclasses.replace(one, low=bounds[name][0], high=bounds[name][1])
            for name, one in read_norm_stats(self.folder).items()
        }
        return stats, details["notes"]

    def _details(self) -> dict[str, Any] | None:
        """What `store` has written beside the stats; None if there is nothing, or it cannot be read."""
        path = self.folder / _DETAILS
        if not path.is_file():
            return None
        try:
            details = files.read_json(path)
            missing = {"fingerprint", "extremes", "notes", "sha256", "spikes"} - details.keys()
            if missing:
                raise ValueError(f"it lacks {', '.join(sorted(missing))}")
        except (ValueError, AttributeError) as error:
            logger.warning("norm stats: %s cannot be read (%s); computing them again", path, error)
            return None
        return details

    def _fingerprint(self) -> str:
        """A digest of what the stats depend on; of the weights only the ratio matters."""
        shares = [f"{weight / sum(self.weights):.12g}" for weight in self.weights]
        parts = [
            [w.source.fingerprint, repr(w.robot), repr(w.shape), w.split, w.validation_fraction, share]
            + (["skip_unlabeled"] if w.unlabeled.any() else [])
            + ([] if w.only is None else ["only", w.only])
            for w, share in zip(self.windows, shares, strict=True)
        ]
        return _sha256(json.dumps([_VERSION, self.max_samples, parts]).encode())


def assets(config: DataConfig, windows: Sequence[Windows], folder: str | Path) -> list[Asset]:
    """The assets of a run, cached below `folder`; `windows` are those of its datasets, in order.

    Raises ValueError if datasets with the same asset id cannot share norm stats.
    """
    groups: dict[str, list[tuple[Windows, Dataset]]] = {}
    for window, dataset in zip(windows, config.datasets, strict=True):
        groups.setdefault(dataset.asset, []).append((window, dataset))
    for asset, members in groups.items():
        names = {(window.robot.state_names, window.robot.action_names) for window, _ in members}
        if len(names) > 1 or len({dataset.norm_stats for _, dataset in members}) > 1:
            raise ValueError(
                f"{len(members)} datasets share the norm stats {asset!r} but differ in their robots' dims or in "
                "`norm_stats`; give each its own --data.datasets.N.asset-id"
            )
    return [
        Asset(
            name=name,
            windows=[window for window, _ in members],
            weights=[dataset.weight for _, dataset in members],
            folder=Path(folder) / name,
            max_samples=config.max_norm_stats_samples,
            given=members[0][1].norm_stats,
        )
        for name, members in groups.items()
    ]


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _chosen(size: int, max_samples: int) -> np.ndarray:
    if size <= max_samples:
        return np.arange(size)
    return np.sort(order.permute(np.arange(max_samples), size, key=0))


def _states(window: Windows, chosen: np.ndarray) -> Iterator[np.ndarray]:
    for samples in _blocks(window, chosen, 1):
        yield window.robot.to_model(window.steps.state[window.starts[samples]])[0]


def _actions(window: Windows, chosen: np.ndarray) -> Iterator[np.ndarray]:
    for samples in _blocks(window, chosen, window.shape.horizon):
        _, actions, real = window.chunks(samples)
        yield actions[real]


def _blocks(window: Windows, chosen: np.ndarray, rows_per_sample: int) -> Iterator[np.ndarray]:
    size = max(1, _BLOCK_VALUES // (rows_per_sample * len(window.robot.action_names)))
    progress = Progress("norm stats, this pass", len(chosen), "samples")
    for start in range(0, len(chosen), size):
        yield chosen[start : start + size]
        progress.add(size)
