"""Random access to episodes in parquet files: columns from the index, pictures from the copy beside it.

Read next: `parquet_index.py` (built at the first opening).
"""

from pathlib import Path

from openpi_train.data.core.damage import of_record
from openpi_train.data.core.source import About
from openpi_train.data.core.tables import Tables
from openpi_train.data.formats.spans import read_span
from openpi_train.data.formats.stored import StoredSource


class ParquetSource(StoredSource):
    """An opened dataset. See `Source`."""

    def __init__(self, root: Path, index: Tables):
        super().__init__(root, index)
        self._spans = index.group("spans/")

    def encoded(self, step: int, camera: str) -> bytes:
        """The camera's picture at one step as stored."""
        self.check(step, camera)
        file = int(self.stored.arrays["data_files"][self.episode_of(step)])
        path = self.stored.root / self.stored.manifest["tables"] / "pictures" / f"{file}.bin"
        try:
            return read_span(path, *self.stored.manifest["pictures"][str(file)], *self._spans[camera][step].tolist())
        except OSError as error:
            raise of_record(error, f"{self.describe(step)}, {camera}") from error

    def about(self) -> About:
        """See `Source.about`: the columns that are left out."""
        return About(left_out=self.stored.manifest["skipped"])

    def describe(self, step: int) -> str:
        episode = self.episode_of(step)
        file = self.stored.manifest["sources"][int(self.stored.arrays["data_files"][episode])][0]
        row = int(self.stored.arrays["first_rows"][episode]) + step - self.steps_of(episode).start
        return f"{self._root / file}, row {row}, {self.place_of(step)}"
