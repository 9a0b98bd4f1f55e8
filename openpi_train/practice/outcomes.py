"""What came of attempts at each context so far: a pure function of gathered outcomes, saved with the run's position.

Read next: `practice_feed.py`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

# The least outcome of an attempt that achieved it.
SOLVED = 1.0


class Outcomes:
    """By context: attempts, those that achieved it (outcome at least 1), whether the last group all did, and how often
    it was passed over since.
    """

    def __init__(self, saved: Mapping[str, Any] | None = None):
        self._table: dict[int, list[int]] = {int(context): list(row) for context, row in (saved or {}).items()}

    def record(self, contexts: np.ndarray, outcomes: np.ndarray) -> None:
        """Add attempts. Those that have no outcome (NaN) say nothing of their context."""
        for context in np.unique(contexts).tolist():
            own = outcomes[contexts == context]
            own = own[~np.isnan(own)]
            if len(own):
                attempts, achieved, *_ = self._table.get(context, [0, 0, 0, 0])
                right = int((own >= SOLVED).sum())
                self._table[context] = [attempts + len(own), achieved + right, int(right == len(own)), 0]

    def passes_over(self, context: int, most: int) -> bool:
        """Whether this context is not drawn this time, since its last attempts all achieved it. Counts the times."""
        row = self._table.get(context)
        if row is None or not row[2] or row[3] >= most:
            return False
        row[3] += 1
        return True

    def rate(self, context: int) -> float | None:
        """The share of a context's attempts that achieved it; None if there were none."""
        row = self._table.get(context)
        return None if row is None else row[1] / row[0]

    def as_json(self) -> dict[str, list[int]]:
        """The table, for `Outcomes(saved)`."""
        return {str(context): list(row) for context, row in sorted(self._table.items())}
