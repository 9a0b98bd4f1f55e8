"""Episodes that are nearly copies of each other, found by digests of their rows (MinHash; Broder 1997).

A row, all states and actions of a control step, is rounded to a hundredth of each dim's spread and hashed. An episode
keeps the smallest hashes of its distinct rows: episodes that share many rows share some of these.
"""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

_KEPT = 8
_SAMPLE = 10_000
_PARTS_OF_SPREAD = 100
# Episodes with fewer distinct rows are not compared.
FEWEST_ROWS = 8
# Which share of the shorter episode's rows the other one has, too.
SHARE = 0.8
_NONE = np.iinfo(np.uint64).max


@dataclasses.dataclass(frozen=True, eq=False)
class RowDigests:
    """Hashes of rows: `cells` is the width to which each dim is rounded, `factors` its factor, odd uint64."""

    cells: np.ndarray
    factors: np.ndarray

    @classmethod
    def of(cls, columns: Sequence[np.ndarray]) -> "RowDigests":
        """For these columns, each [steps, dims]; the spread is that of at most 10,000 rows, evenly spread."""
        spreads = [np.empty(0)]
        for column in columns:
            steps = np.unique(np.linspace(0, len(column) - 1, min(len(column), _SAMPLE)).astype(np.int64))
            seen = np.asarray(column[steps], np.float64)
            spreads.append(np.std(np.where(np.isfinite(seen), seen, 0), axis=0))
        spread = np.concatenate(spreads)
        factors = np.random.default_rng(0).integers(0, 2**63, len(spread), np.uint64) * np.uint64(2) + np.uint64(1)
        return cls(np.where(spread > 0, spread / _PARTS_OF_SPREAD, 1.0), factors)

    def rows(self, columns: Sequence[np.ndarray]) -> np.ndarray:
        """The hash of each row, uint64 [n], of columns [n, dims]."""
        hashes = np.zeros(len(columns[0]) if columns else 0, np.uint64)
        dim = 0
        for column in columns:
            width = column.shape[1]
            cells, factors = self.cells[dim : dim + width], self.factors[dim : dim + width]
            with np.errstate(invalid="ignore"):
                whole = np.floor(np.where(np.isfinite(column), column, 0) / cells + 0.5)
                hashes += (whole.astype(np.int64).view(np.uint64) * factors).sum(axis=1, dtype=np.uint64)
            dim += width
        # The sum's low bits are poor: splitmix64's last steps (Steele et al. 2014).
        hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        return hashes ^ (hashes >> np.uint64(27))

    def of_episodes(self, columns: Sequence[np.ndarray], starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """The smallest hashes of each episode's distinct rows, uint64 [episodes, 8]; the largest uint64 for none."""
        found = np.full((len(starts), _KEPT), _NONE, np.uint64)
        hashes = self.rows(columns)
        for episode, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            distinct = np.unique(hashes[start:end])
            if len(distinct) >= FEWEST_ROWS:
                found[episode] = distinct[:_KEPT]
        return found


def candidates(hashes: np.ndarray) -> list[tuple[int, int]]:
    """Pairs of episodes, the earlier first, that share at least two of their kept hashes."""
    episode = np.repeat(np.arange(len(hashes)), hashes.shape[1])
    flat = hashes.ravel()
    order = np.lexsort((episode, flat))
    flat, episode = flat[order], episode[order]
    begins = np.flatnonzero(np.concatenate([[True], flat[1:] != flat[:-1]]))
    shared: collections.Counter[tuple[int, int]] = collections.Counter()
    for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(flat)], strict=True):
        if end - begin > 1 and flat[begin] != _NONE:
            # With the first and the one before: enough to find all of many copies, and linear.
            for at in range(begin + 1, end):
                shared.update({(int(episode[begin]), int(episode[at])), (int(episode[at - 1]), int(episode[at]))})
    return sorted(pair for pair, times in shared.items() if times >= 2 and pair[0] != pair[1])


def share_of_rows(one: np.ndarray, other: np.ndarray) -> float:
    """Which share of the distinct hashes of the shorter episode the other one has, too."""
    one, other = np.unique(one), np.unique(other)
    return len(np.intersect1d(one, other, assume_unique=True)) / max(1, min(len(one), len(other)))
