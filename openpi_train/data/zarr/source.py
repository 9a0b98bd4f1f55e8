"""Zarr replay buffers by random access: columns from the index, pictures from their chunks or from a decoded copy.

Read next: `layout.py` (what the arrays are), `index.py` (built at the first opening), `store.py` (reads chunks).
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np

from openpi_train.data import places, tables
from openpi_train.data.source import About, BadRecord, Source, SourceConfig, column_name, report_dropped
from openpi_train.data.stored import StoredSource, reopen
from openpi_train.data.zarr.index import FORMAT, is_fresh, open_index
from openpi_train.data.zarr.layout import ABOUT, Camera, pictures, read_layout, require, sort_arrays
from openpi_train.data.zarr.store import Store

# Decompressed chunks that a process keeps: a few of Push-T's largest (161 pictures of 96 x 96 in float32: 18 MB).
_CACHE_BYTES = 1 << 28


@dataclasses.dataclass(frozen=True, kw_only=True)
class Zarr(SourceConfig):
    """A replay buffer of diffusion_policy or RoboTwin, zarr format 2 or 3, on a local or mounted disk."""

    # The store: a folder, or a zip file.
    path: str
    # Where the index is kept (the columns, and the decoded copy); None: $OPENPI_TRAIN_HOME/index.
    cache_dir: str | None = None
    # Keep all pictures decoded beside the index, memory-mapped: as fast as memory, and shared by all processes. None:
    # where chunks hold several pictures, and the copy takes at most a quarter of the free disk.
    decoded_copy: bool | None = None
    # Chunks without a file hold the fill value (zarr 3 leaves such chunks out); else they count as lost.
    fill_missing: bool = False
    # Verify the index's checksums when it is opened.
    check_crc: bool = True
    # An episode with a chunk that is missing or does not decode: stop, or leave it out.
    on_bad_record: Literal["error", "skip"] = "error"

    def open(self) -> Source:
        """Open the store, building or refreshing its index first.

        Raises FileNotFoundError (no store), ValueError (no replay buffer), BadRecord (damaged episodes and
        `on_bad_record="error"`), OSError (a cache that cannot be written).
        """
        index = open_index(
            self._store,
            cache_dir=places.indexes(self.cache_dir),
            decoded_copy=self.decoded_copy,
            check_crc=self.check_crc,
        )
        dropped = [(1, f"episode {entry['episode']}: {entry['why']}") for entry in index.manifest["dropped"]]
        report_dropped(str(self._store.root), dropped, self.on_bad_record)
        return ZarrSource(self._store, index)

    def is_ready(self) -> bool:
        """Whether `open` finds an index that is up to date, or first has to read the store. Raises as `open` does."""
        return is_fresh(self._store, cache_dir=places.indexes(self.cache_dir), decoded_copy=self.decoded_copy)

    def column_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each column, per step, from the store's metadata alone."""
        require(self._store)
        return {name: shape for name, (_, shape) in sort_arrays(self._store)[0].items()}

    @property
    def _store(self) -> Store:
        return Store(Path(self.path).expanduser(), fill_missing=self.fill_missing, cache_bytes=_CACHE_BYTES)


class ZarrSource(StoredSource):
    """An opened replay buffer. See `Source`; pickles as its paths, so that a data worker maps the same files."""

    def __init__(self, store: Store, index: tables.Tables):
        super().__init__(store.root, index)
        self._store = store
        self.num_dropped = len(index.manifest["dropped"])
        self.columns = {column_name(name): column for name, column in self.columns.items()}
        self.cameras = tuple(map(column_name, index.manifest["cameras"]))
        self._stored = dict(zip(self.cameras, index.manifest["cameras"], strict=True))
        self._cameras = {
            name: Camera((camera["size"][0], camera["size"][1]), camera["channels_first"])
            for name, camera in index.manifest["cameras"].items()
        }
        # Mapped now: another process may build the index anew meanwhile.
        folder = index.root / index.manifest["tables"] / "frames"
        copied = self._cameras if index.manifest["decoded"] else ()
        self._decoded = {
            name: np.memmap(folder / f"{name}.bin", np.uint8, "r").reshape(-1, *self._cameras[name].size, 3)
            for name in copied
        }

    def __reduce__(self):
        return _reopen, (self._store, self.stored.root, self.fingerprint)

    def frames(self, steps: np.ndarray, camera: str) -> np.ndarray:
        """See `Source.frames`; a chunk that holds several of the frames is decompressed once."""
        steps = np.asarray(steps, np.int64).reshape(-1)
        for step in steps.tolist():
            self.check(step, camera)
        stored = self._stored[camera]
        layout = self._cameras[stored]
        if not len(steps):
            return np.empty((0, *layout.size, 3), np.uint8)
        rows = self._rows(steps)
        if self._decoded:
            return self._decoded[stored][rows]
        try:
            return np.ascontiguousarray(pictures(stored, self._store.read(f"data/{stored}", rows), layout))
        except ValueError as error:
            raise BadRecord(f"{self.describe(int(steps[0]))}, {camera}: {error}") from error

    def about(self) -> About:
        """See `Source.about`; the store's attributes have it where `data convert` wrote it."""
        left_out = {column_name(name): why for name, why in read_layout(self._store).skipped.items()}
        return About.from_json(self._store.attributes.get(ABOUT, {}), left_out)

    def describe(self, step: int) -> str:
        """See `Source.describe`."""
        return f"{self._root}, row {int(self._rows(np.array([step]))[0])}, {self.place_of(step)}"

    def _rows(self, steps: np.ndarray) -> np.ndarray:
        """The store's rows; they differ from the steps behind an episode that was left out."""
        episodes = np.searchsorted(self.episode_ends, steps, side="right")
        starts = np.where(episodes > 0, self.episode_ends[episodes - 1], 0)
        return self.stored.arrays["first_rows"][episodes] + steps - starts


def _reopen(store: Store, place: Path, fingerprint: str) -> ZarrSource:
    return ZarrSource(store, reopen(place, fingerprint, format_version=FORMAT))
