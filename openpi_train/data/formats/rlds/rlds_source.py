"""Random access to RLDS datasets in the TFRecord shards of tensorflow-datasets, the native dataset format.

Read next: `rlds_index.py` (the cached index of image locations), `robot/windows.py` (samples from a source).

Reading an image takes one `pread` and one decode. Neither TensorFlow nor a copy of the dataset is needed; columns,
prompts and episode ends come from the index as memory-mapped arrays.
"""

from pathlib import Path

import numpy as np

from openpi_train.data.core import files, tables
from openpi_train.data.core.damage import of_record
from openpi_train.data.core.source import About
from openpi_train.data.formats.rlds.schema import ABOUT_FILE, read_about
from openpi_train.data.formats.spans import read_span
from openpi_train.data.formats.stored import StoredSource


class RldsSource(StoredSource):
    """An opened split. See `Source`."""

    def __init__(self, directory: Path, index: tables.Tables):
        super().__init__(directory, index)
        self._spans = index.group("spans/")
        shards = index.manifest["shards"]
        self._files = [(directory / shard["name"], shard["size"], shard["mtime_ns"]) for shard in shards]

    def encoded(self, step: int, camera: str) -> bytes:
        self.check(step, camera)
        offset, length = self._spans[camera][step].tolist()
        shard = int(np.searchsorted(self.stored.arrays["shard_ends"], step, side="right"))
        try:
            return read_span(*self._files[shard], offset, length)
        except OSError as error:
            raise of_record(error, f"{self.describe(step)}, {camera}") from error

    def about(self) -> About:
        return read_about(self._root, self.stored.manifest["prompt_feature"], self.stored.manifest["skipped"])

    @property
    def recorded_hz(self) -> float | None:
        """See `Source.recorded_hz`; tensorflow-datasets is not asked, whose metadata have no place for it."""
        kept = self._root / ABOUT_FILE
        return About.from_json(files.read_json(kept)).control_hz if kept.is_file() else None

    def describe(self, step: int) -> str:
        shard = int(np.searchsorted(self.stored.arrays["shard_ends"], step, side="right"))
        record = int(self.stored.arrays["records"][self.episode_of(step)])
        return f"{self._files[shard][0]}, record {record}, {self.place_of(step)}"
