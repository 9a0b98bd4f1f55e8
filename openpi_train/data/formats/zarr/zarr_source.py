"""Random access to zarr replay buffers: columns from the index, pictures from their chunks or from a decoded copy.

Read next: `zarr_layout.py` (the arrays' roles), `zarr_index.py` (built at the first opening), `store.py` (reads
chunks).
"""

from typing import Any

import numpy as np

from openpi_train.data.core import tables
from openpi_train.data.core.damage import of_record
from openpi_train.data.core.source import About, column_name
from openpi_train.data.formats.stored import StoredSource
from openpi_train.data.formats.zarr.store import Store
from openpi_train.data.formats.zarr.zarr_layout import ABOUT, PictureArray, pictures, read_layout


class ZarrSource(StoredSource):
    """An opened replay buffer. See `Source`."""

    def __init__(self, store: Store, index: tables.Tables):
        super().__init__(store.root, index)
        self._store = store
        self.columns = {column_name(name): column for name, column in self.columns.items()}
        self.cameras = tuple(map(column_name, index.manifest["cameras"]))
        self._stored = dict(zip(self.cameras, index.manifest["cameras"], strict=True))
        self._cameras = {
            name: PictureArray((camera["size"][0], camera["size"][1]), camera["channels_first"])
            for name, camera in index.manifest["cameras"].items()
        }
        # Mapped now: another process may rebuild the index later.
        folder = index.root / index.manifest["tables"] / "frames"
        copied = self._cameras if index.manifest["decoded"] else ()
        self._decoded = {
            name: np.memmap(folder / f"{name}.bin", np.uint8, "r").reshape(-1, *self._cameras[name].size, 3)
            for name in copied
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return ZarrSource, (self._store, self.stored)

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
        except (OSError, ValueError) as error:
            raise of_record(error, f"{self.describe(int(steps[0]))}, {camera}") from error

    def about(self) -> About:
        """See `Source.about`; read from the store's attributes if `data convert` wrote it."""
        left_out = {column_name(name): why for name, why in read_layout(self._store).skipped.items()}
        return About.from_json(self._store.attributes.get(ABOUT, {}), left_out)

    def describe(self, step: int) -> str:
        return f"{self._root}, row {int(self._rows(np.array([step]))[0])}, {self.place_of(step)}"

    def _rows(self, steps: np.ndarray) -> np.ndarray:
        """The store's rows of these steps; they differ after an episode that was left out."""
        episodes = np.searchsorted(self.episode_ends, steps, side="right")
        starts = np.where(episodes > 0, self.episode_ends[episodes - 1], 0)
        return self.stored.arrays["first_rows"][episodes] + steps - starts
