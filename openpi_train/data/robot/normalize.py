"""Normalisation: norm stats, the normalisation methods, the guard against degenerate dims, and openpi's file format.

The file and two methods are openpi's (`shared/normalize.py`, `transforms.py` of Physical-Intelligence/openpi), so
checkpoints and assets can be exchanged in both directions; openpi ignores `min`, `max`, `most_min` and `most_max`,
which our files also hold. `min_max` is diffusion policy's (`model/common/normalizer.py` of
real-stanford/diffusion_policy, mode "limits").

Read next: `norm_stats.py`, which computes them from columns.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from openpi_train.data.core import files
from openpi_train.json_object import JsonObject

Form = Literal["z_score", "quantile", "min_max"]
FILE_NAME = "norm_stats.json"

_EPSILON = 1e-6
# For min_max: a dim whose range is smaller, in its own unit, is normalised to 0.
CONSTANT_RANGE = 1e-4
# What lies farther from q01..q99 than this many times their range is a spike, if few are: `spiked`, `spikes.py`, and
# `data check` (`check/number_kinds.py`) have the same. The full range is then a hundred times that of the quantiles.
SPIKE_DISTANCE = 49.0
# The smallest divisor, as a fraction of the dim's own range: normalised values stay within about 1 / fraction.
# BridgeData's rotations, whose range is large because of rare wraps by 2 pi, are above both.
_LEAST_STD_OF_RANGE = 2e-3
_LEAST_QUANTILE_RANGE_OF_RANGE = 1e-2
# ... and as a fraction of the median scale of all dims, for dims that contain only noise.
_LEAST_OF_TYPICAL = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormStats:
    """Statistics per dim of one array (`state` or `actions`): float64 [dims] each.

    `low` and `high` are the extremes; `most_low` and `most_high` those of all but the outermost few values, mostly 1 in
    1000 (`norm_stats.py`). None if a file does not have them.
    """

    mean: np.ndarray
    std: np.ndarray
    q01: np.ndarray
    q99: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    most_low: np.ndarray | None = None
    most_high: np.ndarray | None = None


Stats = Mapping[str, NormStats]


def normalize(x: np.ndarray, stats: NormStats, form: Form) -> np.ndarray:
    """The normalised x [..., d]; stats wider than x are cut to its width. Raises ValueError if x is wider."""
    width = x.shape[-1]
    if width > len(stats.mean):
        raise ValueError(f"mismatched norm stats: the data has {width} dims, the norm stats {len(stats.mean)}")
    if form == "z_score":
        return (x - stats.mean[:width]) / (stats.std[:width] + _EPSILON)
    if form == "min_max":
        low, scale, centre = (part[:width] for part in _limits(stats))
        return (x - low) * scale - centre
    q01, q99 = stats.q01[:width], stats.q99[:width]
    return (x - q01) / (q99 - q01 + _EPSILON) * 2.0 - 1.0


def unnormalize(x: np.ndarray, stats: NormStats, form: Form) -> np.ndarray:
    """The inverse, for x [..., d] of at least the stats' width.

    Further dims are padding: `z_score` treats them as mean 0 and std 1, the other methods leave them unchanged.
    """
    width = len(stats.mean)
    if x.shape[-1] < width:
        raise ValueError(f"mismatched norm stats: {x.shape[-1]} dims to un-normalise, the norm stats have {width}")
    known, rest = x[..., :width], x[..., width:].astype(stats.std.dtype)
    if form == "z_score":
        return np.concatenate([known * (stats.std + _EPSILON) + stats.mean, rest * (1.0 + _EPSILON)], axis=-1)
    if form == "min_max":
        low, scale, centre = _limits(stats)
        return np.concatenate([(known + centre) / scale + low, rest], axis=-1)
    known = (known + 1.0) / 2.0 * (stats.q99 - stats.q01 + _EPSILON) + stats.q01
    return np.concatenate([known, rest], axis=-1)


def _limits(stats: NormStats) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Low, scale and centre of each dim: `(x - low) * scale - centre` maps min to -1, max to 1, constant dims to 0."""
    if stats.low is None or stats.high is None:
        raise ValueError("these norm stats have no min and max, which min_max normalisation needs")
    constant = stats.high - stats.low < CONSTANT_RANGE
    scale = np.where(constant, 1.0, 2.0 / np.where(constant, 1.0, stats.high - stats.low))
    return stats.low, scale, np.where(constant, 0.0, 1.0)


def guard(stats: NormStats, names: Sequence[str]) -> tuple[NormStats, dict[str, str]]:
    """The stats with degenerate dims widened, and a note for each such dim.

    A joint that rests in 98 of 100 steps has q01 = q99, and its motions would become targets in the thousands
    (openpi#814). Its quantile range is replaced by its full range, without spikes; a std or range that is still tiny
    compared with those of the other dims is raised to a minimum. A dim that moves, and of which only a few values lie
    far outside (`spiked`), is left as it is: its full range would leave nothing of its motion.
    """
    if len(names) != len(stats.mean):
        raise ValueError(f"mismatched norm stats: {len(stats.mean)} dims for {len(names)} named ({', '.join(names)})")
    notes: dict[str, list[str]] = {}

    def note(where: np.ndarray, text: str, values: np.ndarray) -> None:
        for dim in np.flatnonzero(where).tolist():
            notes.setdefault(names[dim], []).append(text.format(values[dim]))

    std, q01, q99 = stats.std, stats.q01, stats.q99
    low, high = _range(stats)
    rare = (q99 - q01) < _LEAST_QUANTILE_RANGE_OF_RANGE * (high - low)
    note(rare, "q99 - q01 = {:.2g}: replaced by the full range", q99 - q01)
    q01, q99 = np.where(rare, low, q01), np.where(rare, high, q99)

    # fmax ignores the NaN of files without quantiles.
    floor = np.fmax(_LEAST_STD_OF_RANGE * (high - low), _LEAST_OF_TYPICAL * _typical(std))
    note(std < floor, "std = {:.2g}: raised", std)
    std = np.maximum(std, floor)

    least_range = _LEAST_OF_TYPICAL * _typical(q99 - q01)
    narrow = (q99 - q01) < least_range
    note(narrow & ~rare, "q99 - q01 = {:.2g}: widened", q99 - q01)
    middle = (q01 + q99) / 2
    q01 = np.where(narrow, middle - least_range / 2, q01)
    q99 = np.where(narrow, middle + least_range / 2, q99)
    return dataclasses.replace(stats, std=std, q01=q01, q99=q99), {dim: "; ".join(text) for dim, text in notes.items()}


def spiked(stats: NormStats) -> np.ndarray:
    """Per dim, whether a few values lie so far outside that its full range says nothing of the others, bool [dims].

    Decided by how many they are: at most 1 in 1000. A dim whose other values are nearly constant is not spiked, since
    the few are all its motion, such as of a gripper that closes once.
    """
    if stats.low is None or stats.high is None or stats.most_low is None or stats.most_high is None:
        return np.zeros(len(stats.mean), bool)
    quantiles, most, full = stats.q99 - stats.q01, stats.most_high - stats.most_low, stats.high - stats.low
    seldom_moves = quantiles < _LEAST_QUANTILE_RANGE_OF_RANGE * most
    nearly_constant = quantiles < _LEAST_OF_TYPICAL * _typical(quantiles)
    beyond_quantiles = quantiles < _LEAST_QUANTILE_RANGE_OF_RANGE * full
    beyond_motions = most < _LEAST_QUANTILE_RANGE_OF_RANGE * full
    return np.where(seldom_moves, beyond_motions, beyond_quantiles & ~nearly_constant)


def _range(stats: NormStats) -> tuple[np.ndarray, np.ndarray]:
    """The extremes of each dim, without spikes; those of the quantiles if nothing else is known."""
    if stats.low is None or stats.high is None:
        return stats.q01, stats.q99
    if stats.most_low is None or stats.most_high is None:
        return stats.low, stats.high
    few = spiked(stats)
    return np.where(few, stats.most_low, stats.low), np.where(few, stats.most_high, stats.high)


def _typical(scale: np.ndarray) -> float:
    moving = scale[scale > 0]
    # If nothing moves at all, 1 / fraction makes the minimum 1: every value is then normalised to about 0.
    return float(np.median(moving)) if moving.size else 1.0 / _LEAST_OF_TYPICAL


def read_norm_stats(path: str | Path) -> dict[str, NormStats]:
    """The stats of openpi's `norm_stats.json` (the file, or the folder that holds it).

    Raises FileNotFoundError, or ValueError if the file is not a valid norm_stats.json.
    """
    path = Path(path).expanduser()
    path = path / FILE_NAME if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"no norm stats at {path}; give a {FILE_NAME}, or none to have them computed")
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not a norm_stats.json: {type(error).__name__}: {error}") from error
    return parse_norm_stats(content, str(path))


def parse_norm_stats(content: Any, where: str) -> dict[str, NormStats]:
    """The stats from the content of openpi's `norm_stats.json`; `where` names it in errors.

    Raises ValueError if the content is invalid.
    """
    try:
        stats = {name: _from_json(entry) for name, entry in content["norm_stats"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{where} is not a norm_stats.json: {type(error).__name__}: {error}") from error
    for name, entry in stats.items():
        given = [getattr(entry, field) for field in _PUBLIC.values()]
        if len({len(values) for values in given if values is not None}) != 1:
            raise ValueError(f"{where}: {', '.join(_PUBLIC)} of {name} differ in width")
        if not (np.isfinite(entry.mean).all() and np.isfinite(entry.std).all()):
            raise ValueError(f"{where}: mean or std of {name} holds NaN or infinity; give none to have them computed")
    return stats


def write_norm_stats(folder: str | Path, stats: Stats) -> Path:
    """Write openpi's `norm_stats.json` into `folder`, atomically; returns its path."""
    path = Path(folder) / FILE_NAME
    files.write_text(path, json.dumps(norm_stats_json(stats), indent=2))
    return path


def norm_stats_json(stats: Stats) -> dict[str, Any]:
    """The content of openpi's `norm_stats.json`."""
    entries = {}
    for name, entry in stats.items():
        known = {key: getattr(entry, field) for key, field in _PUBLIC.items()}
        entries[name] = {key: value.tolist() for key, value in known.items() if value is not None}
    return {"norm_stats": entries}


def differing_norm_stats(own: Mapping[str, JsonObject], others: Mapping[str, JsonObject]) -> str | None:
    """Where two sets of norm stats, as their files hold them by asset id, scale a dim otherwise; None: nowhere.

    Means and quantiles may differ by a twentieth of the scale, and scales by a twentieth: other code that computes them
    from the same data does. Each set's only asset is compared whatever it is called; others that one set lacks are not.
    """
    if len(own) == len(others) == 1:
        own, others = ({"": next(iter(each.values()))} for each in (own, others))
    for asset in own.keys() & others.keys():
        found, expected = own[asset]["norm_stats"], others[asset]["norm_stats"]
        for name in found.keys() & expected.keys():
            for low, high in (("mean", "std"), ("q01", "q99")):
                pairs = [(entry.get(low), entry.get(high)) for entry in (found[name], expected[name])]
                if any(None in pair for pair in pairs):
                    continue
                (x, y), (u, v) = (map(np.array, pair) for pair in pairs)
                if x.shape != u.shape:
                    return f"{name} has {len(x)} dims, not {len(u)}"
                scale, other = (y, v) if low == "mean" else (y - x, v - u)
                far = np.maximum(np.abs(scale - other), np.abs(x - u)) > 0.05 * np.maximum(other, 1e-6)
                if far.any():
                    n = int(far.argmax())
                    return f"{name}[{n}] has {low} {x[n]:.4g} and {high} {y[n]:.4g}, not {u[n]:.4g} and {v[n]:.4g}"
    return None


_PUBLIC = {"mean": "mean", "std": "std", "q01": "q01", "q99": "q99", "min": "low", "max": "high"}
_PUBLIC |= {"most_min": "most_low", "most_max": "most_high"}


def _from_json(entry: Mapping[str, Sequence[float] | None]) -> NormStats:
    given = {field: entry.get(key) for key, field in _PUBLIC.items()}
    found = {field: np.asarray(values, np.float64) for field, values in given.items() if values is not None}
    if not {"q01", "q99"} <= found.keys():
        # openpi allows files without quantiles; these can be used with z_score only.
        found |= dict.fromkeys(("q01", "q99"), np.full_like(found["mean"], np.nan))
    return NormStats(**found)
