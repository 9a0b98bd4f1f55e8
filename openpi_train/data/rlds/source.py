"""The native dataset format: RLDS as tensorflow-datasets publishes it, read by random access over its TFRecord shards.

Read next: `index.py` (the cached index that says where each image lies), `data/windows.py` (rows out of a source).

One image costs one `pread` and one decode. Neither TensorFlow nor a copy of the dataset is needed; columns, prompts and
episode ends come from the index as memory-mapped arrays.
"""

import dataclasses
import functools
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from openpi_train.data import image, places, tables
from openpi_train.data.repack import StepArray, is_repacked
from openpi_train.data.rlds.index import FORMAT, IndexOptions, is_fresh, open_index
from openpi_train.data.rlds.schema import find_version
from openpi_train.data.source import BadRecord, Source, SourceConfig

logger = logging.getLogger(__name__)

# Far below the usual limit of 1024 open files, since BridgeData alone has as many shards.
_OPEN_FILES = 256


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
        index = open_index(directory, self._options(), cache_dir=self._cache_dir(), workers=self.build_workers)
        dropped = index.manifest["dropped"]
        if dropped:
            self._report_dropped(directory, dropped)
        return RldsSource(directory, index)

    def is_ready(self) -> bool:
        """Whether `open` finds an index that is up to date, or first has to read all shards for minutes or hours.

        Raises FileNotFoundError (no dataset, missing shards) and ValueError (unknown split), without reading a shard.
        """
        if is_repacked(self.path):
            return True
        return is_fresh(find_version(self.path), self._options(), cache_dir=self._cache_dir())

    def _options(self) -> IndexOptions:
        return IndexOptions(self.split, self.prompt_feature, self.wide_columns, self.check_crc)

    def _cache_dir(self) -> Path:
        return Path(self.cache_dir).expanduser() if self.cache_dir else places.indexes()

    def _report_dropped(self, directory: Path, dropped: list[dict[str, Any]]) -> None:
        episodes = sum(entry["episodes"] for entry in dropped)
        lines = [
            f"{entry['file']}, record {entry['record']} (episode {entry['record']} of that file): {entry['why']}"
            for entry in dropped
        ]
        summary = f"{episodes} episodes of {directory} split {self.split!r} cannot be read"
        shown = "\n  ".join([*lines[:10], *(["..."] if len(lines) > 10 else [])])
        if self.on_bad_record == "error":
            raise BadRecord(
                f"{summary}:\n  {shown}\n"
                "Fetch these files again, or leave the episodes out with --data.on-bad-record skip "
                "(of the `data` verb: --on-bad-record skip)"
            )
        logger.warning("%s and are left out:\n  %s", summary, shown)


class RldsSource(Source):
    """An opened split. See `Source`; pickles as its paths, so that a data worker maps the same files."""

    def __init__(self, directory: Path, index: tables.Tables):
        self._directory, self._index = directory, index
        manifest, arrays = index.manifest, index.arrays
        self.fingerprint = manifest["fingerprint"]
        self.episode_ends = arrays["episode_ends"]
        self.episode_ids = cast(Sequence[str], arrays["episode_ids"])
        self.columns = index.group("columns/")
        self.prompts = index.prompts
        self.prompt_index = arrays["prompt_index"]
        self.cameras = tuple(manifest["cameras"])
        self.num_dropped = sum(entry["episodes"] for entry in manifest["dropped"])
        self._spans = index.group("spans/")
        self._files = [(directory / shard["name"], shard["size"], shard["mtime_ns"]) for shard in manifest["shards"]]

    def __reduce__(self):
        return _reopen, (self._directory, self._index.root, self.fingerprint)

    def encoded(self, step: int, camera: str) -> bytes:
        """The camera's picture at one step as stored: one `pread`."""
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} is not in 0..{self.num_steps - 1}")
        if camera not in self._spans:
            raise KeyError(f"no camera {camera!r} in {self._directory}; it has {list(self.cameras)}")
        offset, length = self._spans[camera][step].tolist()
        shard = int(np.searchsorted(self._index.arrays["shard_ends"], step, side="right"))
        try:
            file = _open_file(*self._files[shard])  # held until it is read: the cache may drop it meanwhile
            data = os.pread(file.descriptor, length, offset)
        except OSError as error:
            raise BadRecord(f"{self.describe(step)}, {camera}: {error}") from error
        if len(data) != length:
            raise BadRecord(f"{self.describe(step)}, {camera}: the file ends {length - len(data)} bytes too early")
        return data

    def frames(self, steps: np.ndarray, camera: str) -> np.ndarray:
        """See `Source.frames`; one read and one decode for each step."""
        height, width = self._index.manifest["cameras"].get(camera, (0, 0))
        return image.decode_frames(self, steps, camera, (height, width))

    def describe(self, step: int) -> str:
        """See `Source.describe`."""
        shard = int(np.searchsorted(self._index.arrays["shard_ends"], step, side="right"))
        episode = int(np.searchsorted(self.episode_ends, step, side="right"))
        start = int(self.episode_ends[episode - 1]) if episode else 0
        record = int(self._index.arrays["records"][episode])
        length = int(self.episode_ends[episode]) - start
        return f"{self._files[shard][0]}, record {record}, episode {episode}, step {step - start} of {length}"


def _reopen(directory: Path, root: Path, fingerprint: str) -> RldsSource:
    """Open an index again in another process. Raises ValueError where it was rebuilt with other data meanwhile."""
    manifest = tables.read_manifest(root, format_version=FORMAT)
    if manifest is None or manifest["fingerprint"] != fingerprint:
        raise ValueError(
            f"the index {root} was removed or rebuilt with other data while a run was using it; restart it"
        )
    return RldsSource(directory, tables.open_tables(root, manifest, check_crc=False))


class _OpenFile:
    """A file descriptor that closes when its last user lets it go, so that eviction cannot pull it from a reader."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor

    def __del__(self, close=os.close):
        close(self.descriptor)


@functools.lru_cache(maxsize=_OPEN_FILES)
def _open_file(path: Path, size: int, mtime_ns: int) -> _OpenFile:
    """This process's handle of a shard. Raises OSError where the shard is not the one that was indexed."""
    file = _OpenFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    found = os.fstat(file.descriptor)
    if (found.st_size, found.st_mtime_ns) != (size, mtime_ns):
        raise OSError("the file changed since its index was built; restart the run to have it indexed again")
    return file
