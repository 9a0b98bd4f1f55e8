"""The native dataset format: RLDS as tensorflow-datasets publishes it, read by random access over its TFRecord shards.

Read next: `index.py` (the cached index that says where each image lies), `data/windows.py` (rows out of a source).

One image costs one `pread` and one decode. Neither TensorFlow nor a copy of the dataset is needed; columns, prompts and
episode ends come from the index as memory-mapped arrays.
"""

import dataclasses
from pathlib import Path

import numpy as np

from openpi_train.data import image, places, tables
from openpi_train.data.repack import StepArray, is_repacked
from openpi_train.data.rlds.index import RldsIndex
from openpi_train.data.rlds.schema import find_version, read_about
from openpi_train.data.sidecar import IndexedConfig
from openpi_train.data.source import About, BadRecord, Source
from openpi_train.data.spans import read_span
from openpi_train.data.stored import StoredSource


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rlds(IndexedConfig):
    """An RLDS dataset on a local or mounted disk. Its index takes about 16 bytes per image, and the columns."""

    # <data_dir>/<name>/<version>, or <data_dir>/<name> for its newest version; or a directory that `repack` wrote.
    path: str
    # A split that dataset_info.json names; join several as "train+val".
    split: str = "train"
    # Threads that build the index; 0 is one for each processor.
    build_workers: int = 0
    # Verify the records' checksums while indexing and the index's when it is opened.
    check_crc: bool = True
    # The instruction's text feature ("language_instruction", "episode_metadata/task"), "auto" or "none".
    prompt_feature: str = "auto"
    # Numeric features to keep although they are wider than 256 numbers, e.g. "language_embedding".
    wide_columns: tuple[str, ...] = ()

    def sidecar(self) -> RldsIndex:
        return RldsIndex(
            root=find_version(self.path),
            cache_dir=places.indexes(self.cache_dir),
            check_crc=self.check_crc,
            split=self.split,
            prompt_feature=self.prompt_feature,
            wide_columns=self.wide_columns,
            workers=self.build_workers,
        )

    def read(self, root: Path, index: tables.Tables) -> Source:
        return RldsSource(root, index)

    def open(self) -> Source:
        """See `IndexedConfig.open`; a repacked copy needs no index."""
        if is_repacked(self.path):
            return StepArray(path=self.path, split=self.split, check_crc=self.check_crc).open()
        return super().open()

    def is_ready(self) -> bool:
        return is_repacked(self.path) or super().is_ready()


class RldsSource(StoredSource):
    """An opened split. See `Source`."""

    def __init__(self, directory: Path, index: tables.Tables):
        super().__init__(directory, index)
        self._spans = index.group("spans/")
        shards = index.manifest["shards"]
        self._files = [(directory / shard["name"], shard["size"], shard["mtime_ns"]) for shard in shards]

    def encoded(self, step: int, camera: str) -> bytes:
        """The camera's picture at one step as stored: one `pread`."""
        self.check(step, camera)
        offset, length = self._spans[camera][step].tolist()
        shard = int(np.searchsorted(self.stored.arrays["shard_ends"], step, side="right"))
        try:
            return read_span(*self._files[shard], offset, length)
        except OSError as error:
            raise BadRecord(f"{self.describe(step)}, {camera}: {error}") from error

    def frames(self, steps: np.ndarray, camera: str) -> np.ndarray:
        """See `Source.frames`; one read and one decode for each step."""
        height, width = self.stored.manifest["cameras"].get(camera, (0, 0))
        return image.decode_frames(self, steps, camera, (height, width))

    def about(self) -> About:
        return read_about(self._root, self.stored.manifest["prompt_feature"], self.stored.manifest["skipped"])

    def describe(self, step: int) -> str:
        shard = int(np.searchsorted(self.stored.arrays["shard_ends"], step, side="right"))
        record = int(self.stored.arrays["records"][self.episode_of(step)])
        return f"{self._files[shard][0]}, record {record}, {self.place_of(step)}"
