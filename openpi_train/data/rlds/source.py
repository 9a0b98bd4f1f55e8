"""The native dataset format: RLDS as tensorflow-datasets publishes it, read by random access over its TFRecord shards.

Read next: `index.py` (the cached index that says where each image lies), `data/windows.py` (rows out of a source).

One image costs one `pread` and one decode. Neither TensorFlow nor a copy of the dataset is needed; columns, prompts and
episode ends come from the index as memory-mapped arrays.
"""

import dataclasses
from pathlib import Path
from typing import Literal

import numpy as np

from openpi_train.data import image, places, tables
from openpi_train.data.repack import StepArray, is_repacked
from openpi_train.data.rlds.index import FORMAT, IndexOptions, is_fresh, open_index
from openpi_train.data.rlds.schema import find_version, read_about
from openpi_train.data.source import About, BadRecord, Source, SourceConfig, report_dropped
from openpi_train.data.spans import read_span
from openpi_train.data.stored import StoredSource, reopen


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rlds(SourceConfig):
    """An RLDS dataset on a local or mounted disk."""

    # <data_dir>/<name>/<version>, or <data_dir>/<name> for its newest version; or a directory that `repack` wrote.
    path: str
    # A split that dataset_info.json names; join several as "train+val".
    split: str = "train"
    # Where the index is kept (about 16 bytes per image, and the states and actions); None: $OPENPI_TRAIN_HOME/index.
    cache_dir: str | None = None
    # Threads that build the index; 0 is one for each processor.
    build_workers: int = 0
    # Verify the records' checksums while indexing and the index's when it is opened.
    check_crc: bool = True
    # The instruction's text feature ("language_instruction", "episode_metadata/task"), "auto" or "none".
    prompt_feature: str = "auto"
    # Numeric features to keep although they are wider than 256 numbers, e.g. "language_embedding".
    wide_columns: tuple[str, ...] = ()
    # A record that is torn or fails its checksum: stop, or leave its episode out.
    on_bad_record: Literal["error", "skip"] = "error"

    def open(self) -> Source:
        """Open the split, building or refreshing its index first; a repacked copy needs none.

        Raises FileNotFoundError (no dataset, missing shards), ValueError (unknown split or feature), BadRecord
        (damaged records and `on_bad_record="error"`), OSError (a cache that cannot be written).
        """
        if is_repacked(self.path):
            return StepArray(path=self.path, split=self.split, check_crc=self.check_crc).open()
        directory = find_version(self.path)
        index = open_index(
            directory, self._options(), cache_dir=places.indexes(self.cache_dir), workers=self.build_workers
        )
        line = "{file}, record {record} (episode {record} of that file): {why}"
        dropped = [(entry["episodes"], line.format_map(entry)) for entry in index.manifest["dropped"]]
        report_dropped(f"{directory} split {self.split!r}", dropped, self.on_bad_record)
        return RldsSource(directory, index)

    def is_ready(self) -> bool:
        """Whether `open` finds an index that is up to date, or first has to read all shards for minutes or hours.

        Raises FileNotFoundError (no dataset, missing shards) and ValueError (unknown split), without reading a shard.
        """
        if is_repacked(self.path):
            return True
        return is_fresh(find_version(self.path), self._options(), cache_dir=places.indexes(self.cache_dir))

    def _options(self) -> IndexOptions:
        return IndexOptions(self.split, self.prompt_feature, self.wide_columns, self.check_crc)


class RldsSource(StoredSource):
    """An opened split. See `Source`; pickles as its paths, so that a data worker maps the same files."""

    def __init__(self, directory: Path, index: tables.Tables):
        super().__init__(directory, index)
        manifest = index.manifest
        self.num_dropped = sum(entry["episodes"] for entry in manifest["dropped"])
        self._spans = index.group("spans/")
        self._files = [(directory / shard["name"], shard["size"], shard["mtime_ns"]) for shard in manifest["shards"]]

    def __reduce__(self):
        return _reopen, (self._root, self.stored.root, self.fingerprint)

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
        """See `Source.about`."""
        return read_about(self._root, self.stored.manifest["prompt_feature"], self.stored.manifest["skipped"])

    def describe(self, step: int) -> str:
        """See `Source.describe`."""
        shard = int(np.searchsorted(self.stored.arrays["shard_ends"], step, side="right"))
        record = int(self.stored.arrays["records"][self.episode_of(step)])
        return f"{self._files[shard][0]}, record {record}, {self.place_of(step)}"


def _reopen(directory: Path, place: Path, fingerprint: str) -> RldsSource:
    return RldsSource(directory, reopen(place, fingerprint, format_version=FORMAT))
