"""Text length of batches: each batch is padded to the smallest of a few lengths in which all of its rows fit.

A padding token costs as much as a real one, and every length needs its own compiled program, so only lengths that save
enough work are used. The length of a batch depends only on its samples, so every process knows it without reading them.
Read next: `robot/rows.py`, which cuts the rows.
"""

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

logger = logging.getLogger(__name__)

# Lengths are multiples of this: tensor cores take 8, and appended data then rarely recompiles.
UNIT = 8
# Each additional length must save at least this fraction of a step's work.
_LEAST_SAVING = 0.02


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextLengths:
    """The text lengths of a run's batches, ascending: every row fits in the last one.

    `tokens` has one array per dataset: the maximum number of tokens of each sample's row.
    """

    lengths: tuple[int, ...]
    tokens: tuple[np.ndarray, ...]

    def of(self, dataset: np.ndarray, sample: np.ndarray) -> int:
        """The length of a batch with these samples, given as dataset numbers and sample numbers in them."""
        longest = max(int(self.tokens[number][sample[dataset == number]].max()) for number in np.unique(dataset))
        return next(length for length in self.lengths if longest <= length)


def rounded(tokens: int, most: int) -> int:
    """`tokens` rounded up to the next multiple of `UNIT`, at most `most`."""
    return min(math.ceil(tokens / UNIT) * UNIT, most)


def choose_lengths(
    shares: Mapping[int, float], longest: int, *, batch_size: int, cost: Callable[[int], float], most: int
) -> tuple[int, ...]:
    """Choose at most `most` lengths, ascending up to `longest`, that minimise the expected cost of a batch.

    Args: `shares` maps a number of tokens to the share of rows with that many; `cost(length)` is the cost of a row, in
    any unit. Rows are assumed independent: the probability that a batch fits a length is the share of rows that fit,
    to the power of the batch size.
    """
    sizes = sorted({rounded(tokens, longest) for tokens in shares} - {longest})
    costs = {size: cost(size) for size in (*sizes, longest)}
    fits = {size: sum(share for tokens, share in shares.items() if tokens <= size) ** batch_size for size in sizes} | {
        longest: 1.0
    }

    def expected(lengths: tuple[int, ...]) -> float:
        probable = np.diff([fits[length] for length in lengths], prepend=0.0)
        return float(np.dot(probable, [costs[length] for length in lengths]))

    best = (longest,)
    for count in range(1, most):
        choices = [(*shorter, longest) for shorter in itertools.combinations(sizes, count)]
        found = min(choices, key=expected, default=best)
        if expected(best) - expected(found) < _LEAST_SAVING * costs[longest]:
            break
        best = found
    if len(best) > 1:
        saved = 1 - expected(best) / costs[longest]
        logger.info(
            "text: batches have %s tokens, depending on their rows, which saves about %.0f %% of the tokens "
            "(--data.text-lengths 1: always %d)",
            *(" or ".join(map(str, best)), 100 * saved, longest),
        )
    return best


def shares_of_rows(tokens: Sequence[np.ndarray], weights: Sequence[float]) -> dict[int, float]:
    """The share of rows by maximum number of tokens, from each dataset's samples' `tokens` and its weight."""
    shares: dict[int, float] = {}
    for of_samples, weight in zip(tokens, weights, strict=True):
        lengths, counts = np.unique(of_samples, return_counts=True)
        for length, count in zip(lengths.tolist(), counts.tolist(), strict=True):
            shares[length] = shares.get(length, 0.0) + weight * count / len(of_samples)
    total = sum(shares.values())
    return {length: share / total for length, share in shares.items()}
