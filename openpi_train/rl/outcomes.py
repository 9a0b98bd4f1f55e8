"""What came of rollouts at each prompt so far: a pure function of gathered outcomes, saved with the run's position.

Read next: `rollout_feed.py`.
"""

import numpy as np

from openpi_train.json_object import JsonObject

# The least outcome of a rollout that achieved it.
SOLVED = 1.0


class Outcomes:
    """By prompt: rollouts, those that achieved it (outcome at least 1), whether the last group all did, and how often
    it was passed over since.
    """

    def __init__(self, saved: JsonObject | None = None):
        self._table: dict[int, list[int]] = {int(prompt_id): list(row) for prompt_id, row in (saved or {}).items()}

    def record(self, prompt_ids: np.ndarray, outcomes: np.ndarray) -> None:
        """Add rollouts. Those that have no outcome (NaN) say nothing of their prompt."""
        for prompt_id in np.unique(prompt_ids).tolist():
            own = outcomes[prompt_ids == prompt_id]
            own = own[~np.isnan(own)]
            if len(own):
                rollouts, achieved, *_ = self._table.get(prompt_id, [0, 0, 0, 0])
                right = int((own >= SOLVED).sum())
                self._table[prompt_id] = [rollouts + len(own), achieved + right, int(right == len(own)), 0]

    def passes_over(self, prompt_id: int, most: int) -> bool:
        """Whether this prompt is not drawn this time, since its last rollouts all achieved it. Counts the times."""
        row = self._table.get(prompt_id)
        if row is None or not row[2] or row[3] >= most:
            return False
        row[3] += 1
        return True

    def rate(self, prompt_id: int) -> float | None:
        """The share of a prompt's rollouts that achieved it; None if there were none."""
        row = self._table.get(prompt_id)
        return None if row is None else row[1] / row[0]

    def as_json(self) -> dict[str, list[int]]:
        """The table, for `Outcomes(saved)`."""
        return {str(prompt_id): list(row) for prompt_id, row in sorted(self._table.items())}
