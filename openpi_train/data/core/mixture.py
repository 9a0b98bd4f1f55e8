"""Weighted mixture of datasets: maps a position to a dataset and a sample in it, as a pure function.

Positions are assigned in blocks. At the end of every block each dataset has had its exact share of all positions so
far, to within one sample; inside a block the datasets are shuffled. Read next: `robot/rows.py`, which makes rows of
samples.
"""

from collections.abc import Sequence

import numpy as np

from openpi_train.data.core import order

_MIN_BLOCK = 256


def shares_in_words(names: Sequence[str], weights: Sequence[float]) -> str:
    """The names of a mixture's datasets with their shares of the rows; empty if there is only one."""
    if len(names) < 2:
        return ""
    shares = [100 * weight / sum(weights) for weight in weights]
    return ", ".join(f"{name} {share:.4g} %" for name, share in zip(names, shares, strict=True))


class Mixture:
    """Datasets of given sizes, drawn with given weights (any positive numbers; they are normalised).

    Raises ValueError for a weight that is not positive or a dataset without samples.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int):
        self.sizes, self.seed = tuple(int(size) for size in sizes), int(seed)
        if not self.sizes or len(self.sizes) != len(weights):
            raise ValueError(
                f"a mixture needs one weight per dataset: {len(self.sizes)} datasets, {len(weights)} weights"
            )
        for number, (size, weight) in enumerate(zip(self.sizes, weights, strict=True)):
            if size <= 0:
                raise ValueError(f"dataset {number} of the mixture has no samples; remove it, or check its split")
            if not (np.isfinite(weight) and weight > 0):
                raise ValueError(
                    f"dataset {number} has weight {weight}; weights must be positive: leave it out instead"
                )
        self.weights = np.asarray(weights, np.float64) / np.sum(np.asarray(weights, np.float64))
        # Cumulative shares: a dataset's count is a difference of floors, so its error is below 1 and counts add up.
        self._borders = np.concatenate([np.cumsum(self.weights)[:-1], [1.0]])
        # With at least one expected sample per block and dataset, no count can decrease from block to block.
        self.block = max(_MIN_BLOCK, int(np.ceil(1.0 / self.weights.min())) + 1)

    def locate(self, position: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The (dataset, epoch of that dataset, sample index in it) at each position [n]."""
        block, place = np.divmod(position.astype(np.int64), self.block)
        # A single dataset needs no shuffle of datasets: its epochs then end exactly at multiples of its size.
        shuffled = len(self.sizes) > 1
        slot = order.permute(place, self.block, order.scramble(self.seed, 1, block)) if shuffled else place
        before, after = self._dealt(block * self.block), self._dealt((block + 1) * self.block)
        # Inside a block, slots [0, quota of 0) belong to dataset 0, the next ones to dataset 1, and so on.
        upper = np.cumsum(after - before, axis=-1)
        dataset = np.sum(slot[..., None] >= upper, axis=-1)
        lower = np.concatenate([np.zeros_like(upper[..., :1]), upper[..., :-1]], axis=-1)
        rank = slot - np.take_along_axis(lower, dataset[..., None], -1)[..., 0]
        draw = np.take_along_axis(before, dataset[..., None], -1)[..., 0] + rank
        epoch, index = np.empty_like(draw), np.empty_like(draw)
        for number, size in enumerate(self.sizes):
            mine = dataset == number
            epoch[mine], index[mine] = order.sample_at(draw[mine], size, self.seed, stream=2 + number)
        return dataset, epoch, index

    def counts(self, num_positions: int) -> np.ndarray:
        """Number of the first `num_positions` rows from each dataset, int64 [datasets]."""
        whole = num_positions // self.block * self.block
        counts = self._dealt(np.asarray(whole))
        if whole < num_positions:
            dataset = self.locate(np.arange(whole, num_positions))[0]
            counts = counts + np.bincount(dataset, minlength=len(self.sizes))
        return counts

    def _dealt(self, position: order.Integers) -> np.ndarray:
        """Samples of each dataset before a block border, int64 [..., datasets]."""
        floors = np.floor(np.asarray(position)[..., None] * self._borders).astype(np.int64)
        return np.diff(floors, axis=-1, prepend=0)
