"""`LocalColumns`: entries of rollouts that stay in the process that made them, such as pictures.

Rollout n is always learnt from in row n % batch_size of a batch, and made by the process whose devices hold that row.
Read next: `rollouts.py`.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalColumns:
    """Entries of the rollouts in this process's rows of a batch.

    Attributes:
        rows: This process's rows of a batch, of `batch_size` in all.
        columns: By name [n, rows, ...]: rollout n * batch_size + rows[r] is at [n, r].
    """

    rows: np.ndarray
    batch_size: int
    columns: Mapping[str, np.ndarray]

    def taken(self, numbers: np.ndarray) -> "LocalColumns":
        """Those of these rollouts, each of which takes a place with its own row."""
        numbers = numbers.reshape(-1, self.batch_size)[:, self.rows]
        assert (numbers % self.batch_size == self.rows).all(), "a rollout keeps its row"
        places = numbers // self.batch_size, np.arange(len(self.rows))
        return dataclasses.replace(self, columns={name: one[places] for name, one in self.columns.items()})


def joined_columns(parts: Sequence[LocalColumns]) -> LocalColumns:
    """Those of all these rollouts, in order."""
    names = parts[0].columns
    columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in names}
    return dataclasses.replace(parts[0], columns=columns)
