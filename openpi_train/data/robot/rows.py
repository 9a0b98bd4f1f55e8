"""Rows of a mixture by position: a pure function of (seed, position, data), computed by any process or worker.

Rows are plain dictionaries of numpy arrays, so that data workers need neither jax nor a device.
Read next: `opened.py` (which makes `Rows`), `core/feed.py` (which reads them).
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from openpi_train.data.core import order
from openpi_train.data.core.interface import RowSource, RowSpec
from openpi_train.data.core.mixture import Mixture
from openpi_train.data.core.source import BadRecord
from openpi_train.data.core.text_lengths import TextLengths
from openpi_train.data.robot.windows import Windows
from openpi_train.json_object import JsonObject

Row = dict[str, Any]
RowTransform = Callable[[Row], Row]

_MAX_RETRIES = 100
_RETRY_STREAM = 1 << 32


class Rows(RowSource):
    """The rows of one split of a mixture, at every position of an endless, reshuffled pass.

    Args: `windows`, `names`, `weights` and `transforms` (row to row, in order) have one entry per dataset; `spec` is
    the shape and dtype of each entry of a finished row; `identity` is JSON of what rows depend on besides the seed.
    """

    def __init__(
        self,
        windows: Sequence[Windows],
        names: Sequence[str],
        weights: Sequence[float],
        transforms: Sequence[Sequence[RowTransform]],
        *,
        spec: RowSpec,
        seed: int,
        on_bad_record: Literal["error", "skip"] = "error",
        identity: JsonObject | None = None,
    ):
        self.windows, self.names, self.transforms = tuple(windows), tuple(names), tuple(map(tuple, transforms))
        self.mixture = Mixture([len(window) for window in windows], weights, seed)
        self.spec, self.on_bad_record = dict(spec), on_bad_record
        self.identity = {"seed": seed, **(identity or {})}
        self.num_samples = sum(self.mixture.sizes)
        self.text: TextLengths | None = None
        self.shorter: Mapping[int, RowSpec] = {}

    def in_lengths(self, text: TextLengths, shorter: Mapping[int, RowSpec]) -> "Rows":
        """The same rows in batches of these text lengths; `shorter` has the row spec of each length."""
        rows = copy.copy(self)
        rows.text, rows.shorter = text, shorter
        return rows

    def batch(self, positions: np.ndarray) -> tuple[dict[str, np.ndarray], list[str]]:
        dataset, _, index = self.mixture.locate(positions)
        columns = {name: np.empty((len(positions), *shape), dtype) for name, (shape, dtype) in self.spec.items()}
        skipped: list[str] = []
        for number, position in enumerate(positions.tolist()):
            row = self._row(int(dataset[number]), int(index[number]), position, skipped)
            for name, column in columns.items():
                column[number] = row[name]
        return columns, skipped

    def cut(self, columns: Mapping[str, np.ndarray], positions: np.ndarray) -> dict[str, np.ndarray]:
        if self.text is None:
            return dict(columns)
        dataset, _, index = self.mixture.locate(positions)
        spec = self.shorter[self._length(dataset, index)]
        cut = {name: column[:, *map(slice, spec[name][0])] for name, column in columns.items()}
        for name, column in columns.items():
            if cut[name].shape != column.shape and np.count_nonzero(cut[name]) != np.count_nonzero(column):
                raise ValueError(
                    f"{name}: a row has more text than its sample had when the run started; the data changed, or "
                    "the tokenizer joins words. Start again with --resume, or set --data.text-lengths 1"
                )
        return cut

    def describe(self, positions: np.ndarray) -> list[str]:
        """The sample at each position: dataset, file, record, episode, step."""
        dataset, epoch, index = self.mixture.locate(positions)
        places = zip(dataset.tolist(), epoch.tolist(), index.tolist(), strict=True)
        return [f"{self.names[d]}: {self.windows[d].describe(i)} (epoch {e})" for d, e, i in places]

    def proportions(self, num_positions: int) -> dict[str, float]:
        counts = self.mixture.counts(num_positions)
        return {f"{number}_{name}": int(counts[number]) / num_positions for number, name in enumerate(self.names)}

    def _length(self, dataset: np.ndarray, index: np.ndarray) -> int:
        """The text length of a batch with these samples; 0 if all batches have the same."""
        return self.text.of(dataset, index) if self.text is not None else 0

    def _row(self, dataset: int, index: int, position: int, skipped: list[str]) -> Row:
        error: BadRecord | None = None
        for retry in range(_MAX_RETRIES):
            try:
                return self._finished(dataset, index)
            except BadRecord as bad:
                if self.on_bad_record == "error":
                    raise BadRecord(f"{bad} (--data.on-bad-record skip replaces such rows)") from bad
                error = bad
                skipped.append(str(bad))
            index = self._stand_in(dataset, index, position, retry)
        raise BadRecord(f"{_MAX_RETRIES} rows in turn could not be read from {self.names[dataset]}; the last: {error}")

    def _stand_in(self, dataset: int, index: int, position: int, retry: int) -> int:
        """A replacement sample with no longer text: a function of seed, position and attempt, the same everywhere."""
        of, longest = np.array([dataset]), self._length(np.array([dataset]), np.array([index]))
        for attempt in range(_MAX_RETRIES):
            draw = order.scramble(self.mixture.seed, _RETRY_STREAM, position, retry + attempt * _MAX_RETRIES)
            found = int(draw % np.uint64(self.mixture.sizes[dataset]))
            if self._length(of, np.array([found])) <= longest:
                return found
        return index

    def _finished(self, dataset: int, index: int) -> Row:
        row = self.windows[dataset].row(index)
        for transform in self.transforms[dataset]:
            row = transform(row)
        row = with_all_cameras(row, self.spec)
        for name, (shape, dtype) in self.spec.items():
            if name not in row:
                raise ValueError(
                    f"rows of {self.names[dataset]} have no {name}, which the model takes; they have {sorted(row)}"
                )
            value = np.asarray(row[name])
            if value.shape != shape or value.dtype != dtype:
                raise ValueError(
                    f"{name} of {self.names[dataset]} is {value.dtype} {list(value.shape)} per row; the model takes "
                    f"{dtype} {list(shape)} ({self.windows[dataset].describe(index)})"
                )
        return row


def with_all_cameras(row: Row, spec: RowSpec) -> Row:
    """The row with every camera of `spec`: cameras that only other robots of the run have are black and masked."""
    absent = [name for name in spec if name not in row and name.startswith(("image/", "image_mask/"))]
    return row | {name: np.zeros(*spec[name]) for name in absent}
