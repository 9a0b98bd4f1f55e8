"""How long the text of a batch is made: one of a few lengths, the least in which all of its rows are sure to fit.

A padded token costs what a real one does, and every length is a compiled program more. So there are as many as pay.
Everybody knows the length of any batch without reading it: it is a function of which samples its rows are.
Read next: `rows.py`, which cuts the rows.
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
# A further length must save at least this share of a step's work.
_LEAST_SAVING = 0.02


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextLengths:
    """The lengths of a run's batches, ascending: the last one holds every row.

    `tokens` has an array for every dataset: the most tokens of a row with each of its samples.
    """

    lengths: tuple[int, ...]
    tokens: tuple[np.ndarray, ...]

    def of(self, dataset: np.ndarray, sample: np.ndarray) -> int:
        """The length of a batch of rows with these samples, by dataset and number in it."""
        longest = max(int(self.tokens[number][sample[dataset == number]].max()) for number in np.unique(dataset))
        return self.at_least(longest)

    def at_least(self, tokens: int) -> int:
        """The least length that holds so many tokens."""
        return next(length for length in self.lengths if tokens <= length)


def rounded(tokens: int, most: int) -> int:
    """So many tokens as a length: the next multiple of `UNIT`, at most `most`."""
    return min(math.ceil(tokens / UNIT) * UNIT, most)


def choose_lengths(
    shares: Mapping[int, float], longest: int, *, batch_size: int, cost: Callable[[int], float], most: int
) -> tuple[int, ...]:
    """At most `most` lengths, ascending up to `longest`, that make the expected cost of a batch the least.

    Args: `shares` is the share of rows with so many tokens at most; `cost(length)` what a row costs, in any unit. Rows
    are taken as drawn independently: a batch fits a length with the share of rows that do, to the power of its size.
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
            "text: batches have %s tokens, as their rows need, which saves about %.0f %% of the tokens "
            "(--data.text-lengths 1: always %d)",
            *(" or ".join(map(str, best)), 100 * saved, longest),
        )
    return best


def shares_of_rows(tokens: Sequence[np.ndarray], weights: Sequence[float]) -> dict[int, float]:
    """The share of rows by their most tokens. Per dataset: those of its samples, and its weight."""
    shares: dict[int, float] = {}
    for of_samples, weight in zip(tokens, weights, strict=True):
        lengths, counts = np.unique(of_samples, return_counts=True)
        for length, count in zip(lengths.tolist(), counts.tolist(), strict=True):
            shares[length] = shares.get(length, 0.0) + weight * count / len(of_samples)
    total = sum(shares.values())
    return {length: share / total for length, share in shares.items()}
