"""Index of a replay buffer: its columns as memory-mapped arrays, a digest of every episode, and damaged episodes.

Read next: `formats/sidecar.py` (how an index is kept), `zarr_source.py` (the reader).

    manifest.json             in addition to every index's entries: the store's stamp
    tables-<key>/
      first_rows.npy int64 [episodes]    the store's row of each episode's first step
      frames/<camera>.bin                the decoded copy: the pictures of all rows in order, uint8
"""

import dataclasses
import functools
import hashlib
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from openpi_train.data.core import tables
from openpi_train.data.core.progress import Progress
from openpi_train.data.core.source import Source
from openpi_train.data.formats.sidecar import IndexedConfig, Sidecar, first_changed
from openpi_train.data.formats.zarr.store import BadChunk, Store
from openpi_train.data.formats.zarr.zarr_layout import TASK_ID, ZarrLayout, pictures, read_layout
from openpi_train.data.formats.zarr.zarr_source import ZarrSource
from openpi_train.json_object import JsonObject

logger = logging.getLogger(__name__)

_MOST_OF_FREE_DISK = 0.25
# Cache of decompressed chunks per process: a few of Push-T's largest (161 pictures of 96 x 96 in float32: 18 MB).
_CACHE_BYTES = 1 << 28


@dataclasses.dataclass(frozen=True, kw_only=True)
class Zarr(IndexedConfig):
    """A replay buffer of diffusion_policy or RoboTwin, zarr format 2 or 3, on a local or mounted disk.

    The size of its index is that of the columns and the decoded copy.
    """

    # The store, a folder or a zip file.
    path: str
    # Keep all pictures decoded beside the index, memory-mapped: as fast as memory, and shared by all processes. None:
    # if chunks hold several pictures and the copy takes at most a quarter of the free disk space.
    decoded_copy: bool | None = None
    # Treat chunks without a file as the fill value (zarr 3 omits such chunks); otherwise they count as lost.
    fill_missing: bool = False

    shapes_in_metadata = True

    def store(self) -> Store:
        """The store, not yet read."""
        return Store(Path(self.path).expanduser(), fill_missing=self.fill_missing, cache_bytes=_CACHE_BYTES)

    def sidecar(self) -> "ZarrIndex":
        return ZarrIndex(self, Path(self.path).expanduser())

    def column_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each column, per step, from the store's metadata alone."""
        store = self.store()
        return {name: shape for name, (_, shape) in read_layout(store).columns.items()}

    def num_steps_in_metadata(self) -> int | None:
        return int(read_layout(self.store()).episode_ends[-1])


@dataclasses.dataclass(frozen=True)
class ZarrIndex(Sidecar):
    """The index of a store, and a decoded copy of its pictures if requested or worthwhile."""

    config: Zarr

    dropped_line = "episode {episode}: {why}"

    @functools.cached_property
    def store(self) -> Store:
        """The store that is indexed."""
        return self.config.store()

    @property
    def identity(self) -> str:
        return f"{self.root.resolve()} {self.config.fill_missing} {self.config.decoded_copy}"

    def changed(self, manifest: JsonObject) -> str | None:
        if manifest["stamp"] != self.store.stamp():
            return str(self.root)
        copies = ((name, *found) for name, found in manifest["decoded"].items())
        return first_changed(self.tables_of(manifest), copies)

    def survey(self) -> ZarrLayout:
        return read_layout(self.store)

    def write(self, directory: Path) -> dict[str, Any]:
        """Read every chunk once; see `Sidecar.write`."""
        stamp, layout = self.store.stamp(), self.survey()
        scan = Scan(self.store, layout)
        copies = self.config.decoded_copy
        if copies is None:
            copies = _copy_is_worth_it(self.store, layout, self.place)
        for name in layout.cameras:
            path = directory / "frames" / f"{name}.bin"
            if copies:
                path.parent.mkdir(exist_ok=True)
            with path.open("wb") if copies else open(os.devnull, "wb") as file:
                scan.array(name, lambda block, file=file: file.write(np.ascontiguousarray(block).data))
        for name in layout.columns:
            scan.array(name)
        if layout.tasks:
            scan.array(TASK_ID, check=lambda ids: ids.min() >= 0 and ids.max() < len(layout.tasks), digest=False)
        good = [episode for episode in range(len(layout.episode_ends)) if episode not in scan.problems]
        dropped = [{"episode": episode, "why": why} for episode, why in sorted(scan.problems.items())]
        self.require_episodes(len(good), dropped)
        _write_tables(directory, self.store, layout, scan, good)
        decoded = {str(path.relative_to(directory)): path.stat() for path in directory.glob("frames/*.bin")}
        return {
            "stamp": stamp,
            "cameras": {name: dataclasses.asdict(camera) for name, camera in layout.cameras.items()},
            "decoded": {name: [found.st_size, found.st_mtime_ns] for name, found in decoded.items()},
            "dropped": dropped,
            "skipped": {f"data/{name}": why for name, why in layout.skipped.items()},
            "findings": [finding.as_json() for finding in layout.findings],
        }

    def source(self, index: tables.Tables) -> Source:
        return ZarrSource(self.config.store(), index)


class Scan:
    """Reads whole arrays in blocks, computing a digest of every episode and recording unreadable ones."""

    def __init__(self, store: Store, layout: ZarrLayout):
        self._store, self._layout = store, layout
        self._starts = np.concatenate([[0], layout.episode_ends[:-1]])
        self._digests = [hashlib.sha256() for _ in layout.episode_ends]
        self.problems: dict[int, str] = {}

    def episode_id(self, episode: int) -> str:
        """The digest of an episode's data read so far."""
        return self._digests[episode].hexdigest()[:32]

    def array(
        self,
        name: str,
        take: Callable[[np.ndarray], object] = lambda block: None,
        check: Callable[[np.ndarray], bool] = lambda block: True,
        digest: bool = True,
    ) -> None:
        """Read `data/<name>`; `take` gets all its rows in blocks, with zeros for unreadable rows."""
        info, camera = self._store.arrays[f"data/{name}"], self._layout.cameras.get(name)
        if digest:
            shape = (*camera.size, 3) if camera else self._layout.columns[name][1]
            for entry in self._digests:
                entry.update(f"{name} {'uint8' if camera else info.dtype.name} {shape}".encode())
        progress = Progress(f"{self._store.root.name}: {name}", info.shape[0], "rows")
        for first, end in info.blocks():
            progress.add(end - first)
            pieces = list(self._pieces(name, first, end, check))
            block = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
            take(block)
            for episode in self._touched(first, end) if digest else ():
                mine = slice(max(self._starts[episode] - first, 0), self._layout.episode_ends[episode] - first)
                self._digests[episode].update(np.ascontiguousarray(block[mine]).data)

    def _touched(self, first: int, end: int) -> range:
        """The episodes that contain any of these rows."""
        low, high = np.searchsorted(self._layout.episode_ends, [first, end - 1], side="right").tolist()
        return range(low, high + 1)

    def _pieces(self, name: str, first: int, end: int, check: Callable[[np.ndarray], bool]) -> Iterator[np.ndarray]:
        """The rows of a block, read at once, or chunk by chunk if that fails."""
        try:
            yield self._rows(name, first, end, check)
            return
        except ValueError as error:
            rows = self._store.arrays[f"data/{name}"].chunk_rows
            if end - first <= rows:
                yield self._failed(name, first, end, error)
                return
        for begin in range(first, end, rows):
            yield from self._pieces(name, begin, min(begin + rows, end), check)

    def _rows(self, name: str, first: int, end: int, check: Callable[[np.ndarray], bool]) -> np.ndarray:
        values = self._store.read(f"data/{name}", slice(first, end))
        camera = self._layout.cameras.get(name)
        if camera is not None:
            return pictures(name, values, camera)
        if not check(values):
            raise ValueError(f"it holds numbers from {values.min()} to {values.max()}, which is invalid")
        return values

    def _failed(self, name: str, first: int, end: int, error: ValueError) -> np.ndarray:
        hint = ""
        if isinstance(error, BadChunk) and str(error).endswith("is missing"):
            hint = " (if zarr omitted chunks that hold only fill values: --data.datasets.N.source.fill-missing)"
        for episode in self._touched(first, end):
            self.problems.setdefault(episode, f"data/{name}, rows {first}..{end - 1}: {error}{hint}")
        info, camera = self._store.arrays[f"data/{name}"], self._layout.cameras.get(name)
        shape, dtype = (info.shape[1:], info.dtype) if camera is None else ((*camera.size, 3), np.dtype(np.uint8))
        return np.zeros((end - first, *shape), dtype)


def _write_tables(directory: Path, store: Store, layout: ZarrLayout, scan: Scan, good: list[int]) -> None:
    """Write the tables of all readable episodes."""
    starts = np.concatenate([[0], layout.episode_ends[:-1]])[good]
    stops = layout.episode_ends[good]
    ends = np.cumsum(stops - starts)
    steps = int(ends[-1])

    def column(name: str, dtype: DTypeLike, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            yield store.read(f"data/{name}", slice(start, stop)).reshape(-1, *shape).astype(dtype, copy=False)

    write = functools.partial(tables.write_array, directory)
    write("episode_ends", np.int64, (len(good),), [ends])
    write("episode_ids", "<U32", (len(good),), [np.array([scan.episode_id(episode) for episode in good])])
    write("first_rows", np.int64, (len(good),), [starts])
    for name, (dtype, shape) in layout.columns.items():
        write(f"columns/{name}", dtype, (steps, *shape), column(name, dtype, shape))
    prompts = list(dict.fromkeys(prompt for _, prompt in layout.tasks)) or [""]
    of_task = np.array([prompts.index(prompt) for _, prompt in layout.tasks], np.int32)
    index = (of_task[ids] for ids in column(TASK_ID, np.int64, ())) if layout.tasks else [np.zeros(steps, np.int32)]
    write("prompt_index", np.int32, (steps,), index)
    tables.write_prompts(directory, prompts)


def _copy_is_worth_it(store: Store, layout: ZarrLayout, place: Path) -> bool:
    """Whether reading a picture would decompress others too, and the disk has room for a decoded copy."""
    pictures_of = {name: store.arrays[f"data/{name}"].chunk_rows for name in layout.cameras}
    together = max(pictures_of.values(), default=1)
    if together == 1:
        return False
    copy_bytes = sum(int(layout.episode_ends[-1]) * math.prod(camera.size) * 3 for camera in layout.cameras.values())
    free_bytes = shutil.disk_usage(place).free
    worth = copy_bytes <= _MOST_OF_FREE_DISK * free_bytes
    logger.info(
        "%s: a picture shares its chunk with %d others; %s (%.1f GiB of %.1f free in %s; to decide: "
        "--data.datasets.N.source.decoded-copy True or False)", store.root.name, together - 1,
        "all are kept decoded beside the index" if worth else "reading one decompresses all", copy_bytes / 2**30,
        free_bytes / 2**30, place,
    )  # fmt: skip
    return worth
