"""Zarr replay buffers on disk, formats 2 and 3, in a folder or a zip file: arrays that are read by rows.

The layout is diffusion_policy's (`common/replay_buffer.py` of real-stanford/diffusion_policy) and RoboTwin's:

    data/<name>          one row per control step: head_camera, state, action, img, keypoint, ...
    meta/episode_ends    the row after each episode's last one

tensorstore reads the chunks; the zarr package is not needed. Read next: `zarr_layout.py`, which sorts the arrays.
"""

import dataclasses
import functools
import hashlib
import json
import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.data.core.damage import raise_if_system
from openpi_train.data.core.files import naming

EPISODE_ENDS = "meta/episode_ends"
# Metadata files of a group and of an array, by format.
_GROUP_FILES = (".zgroup", "zarr.json")
_ARRAY_FILES = {".zarray": "zarr", "zarr.json": "zarr3"}
_BLOCK_BYTES = 1 << 25


class BadChunk(ValueError):
    """Error for a chunk of an array that is missing or cannot be decoded."""


@dataclasses.dataclass(frozen=True)
class ArrayInfo:
    """An array's metadata; `chunk_rows` is the number of rows in the smallest chunk that can be read alone."""

    shape: tuple[int, ...]
    dtype: np.dtype
    chunk_rows: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, decompressed."""
        return int(np.prod(self.shape[1:], dtype=np.int64)) * self.dtype.itemsize

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Blocks (first, end) of rows that cover the array: whole chunks, each block one chunk or some tens of MB."""
        chunks = max(1, _BLOCK_BYTES // max(1, self.row_bytes * self.chunk_rows))
        step = chunks * self.chunk_rows
        for first in range(0, self.shape[0], step):
            yield first, min(first + step, self.shape[0])


class Store:
    """A store's arrays by name (`data/action`), opened at first use. Pickles as its path.

    With `fill_missing` a chunk without a file has the array's fill value, as zarr defines it; otherwise it is an error.
    `cache_bytes` is the size of the cache of decompressed chunks.
    """

    def __init__(self, root: Path, *, fill_missing: bool = False, cache_bytes: int = 0):
        self.root, self.fill_missing, self.cache_bytes = root, fill_missing, cache_bytes
        self._is_zip = root.is_file()
        self._handles: dict[str, Any] = {}
        self._context: Any = None

    def __reduce__(self):
        return functools.partial(Store, fill_missing=self.fill_missing, cache_bytes=self.cache_bytes), (self.root,)

    @functools.cached_property
    def drivers(self) -> dict[str, str]:
        """tensorstore's driver for every array of the groups data and meta, sorted by name."""
        return self._listed[0]

    @functools.cached_property
    def _listed(self) -> tuple[dict[str, str], dict[str, str]]:
        """The drivers, and groups and arrays in data whose metadata cannot be read, each with the reason."""
        found, others = {}, {}
        for group in ("data", "meta"):
            folder = self._files / group
            names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else ()
            for name in (f"{group}/{name}" for name in names if not name.startswith(".")):
                if self._json(f"{name}/.zgroup"):
                    others[name] = "a group, not an array"
                for file, driver in _ARRAY_FILES.items():
                    try:
                        metadata = self._json(f"{name}/{file}")
                    except ValueError as error:
                        others[name] = f"its {file} is not JSON ({error})"
                        continue
                    if metadata and metadata.get("node_type", "array") == "array":
                        found[name] = driver
                    elif metadata:
                        others[name] = "a group, not an array"
        return found, others

    @functools.cached_property
    def attributes(self) -> Mapping[str, Any]:
        """The attributes of the root group."""
        return self._json(".zattrs") or self._json("zarr.json").get("attributes", {})

    @property
    def arrays(self) -> dict[str, ArrayInfo]:
        """The metadata of the episodes' ends and of every array in data that can be opened, by name."""
        return self._opened_arrays[0]

    @property
    def unread(self) -> dict[str, str]:
        """What else lies in data, by name, each with the reason: groups, texts, objects, scalars."""
        return {name: why for name, why in self._opened_arrays[1].items() if name.startswith("data/")}

    @functools.cached_property
    def _opened_arrays(self) -> tuple[dict[str, ArrayInfo], dict[str, str]]:
        found, others = {}, dict(self._listed[1])
        for name in (name for name in self.drivers if name == EPISODE_ENDS or name.startswith("data/")):
            try:
                found[name] = self._info(name)
            except ValueError as error:
                others[name] = str(error)
        return found, others

    def read(self, name: str, rows: slice | np.ndarray) -> np.ndarray:
        """Rows of an array; each chunk that they need is decompressed once.

        Raises BadChunk naming its file, OSError if the system fails.
        """
        try:
            return np.asarray(self._opened(name)[rows].read().result())
        except (ValueError, OSError) as error:
            raise_if_system(error, self.root / name)
            raise BadChunk(_plain(str(error))) from error

    def stamp(self) -> str:
        """A digest of all files' names, sizes and times; it differs if the store was changed.

        Raises FileNotFoundError if there is no store.
        """
        if not self.root.exists():
            raise FileNotFoundError(
                f"there is no {self.root} (looked in {Path.cwd()}): name another dataset by --dataset PATH, or make "
                "it, as the experiment's --help says"
            )
        if self._is_zip:
            found = self.root.stat()
            return f"{found.st_size} {found.st_mtime_ns}"
        digest = hashlib.sha256()
        for path, size, mtime_ns in sorted(_walk(self.root)):
            digest.update(f"{os.path.relpath(path, self.root)} {size} {mtime_ns}\n".encode())
        return digest.hexdigest()

    def _opened(self, name: str) -> Any:
        if name not in self._handles:
            import tensorstore

            if self._context is None:
                self._context = tensorstore.Context({"cache_pool": {"total_bytes_limit": self.cache_bytes}})
            file = {"driver": "file", "path": str(self.root.resolve()) + ("" if self._is_zip else f"/{name}/")}
            kvstore = {"driver": "zip", "base": file, "path": f"{name}/"} if self._is_zip else file
            spec = {"driver": self.drivers[name], "kvstore": kvstore, "recheck_cached_data": False}
            spec["fill_missing_data_reads"] = self.fill_missing
            self._handles[name] = tensorstore.open(spec, read=True, context=self._context).result()
        return self._handles[name]

    def _info(self, name: str) -> ArrayInfo:
        try:
            opened = self._opened(name)
        except (ValueError, OSError) as error:
            raise_if_system(error, self.root / name)
            raise ValueError(f"it cannot be opened: {_plain(str(error))}") from error
        if not opened.rank:
            raise ValueError("a scalar, not one row per control step")
        return ArrayInfo(
            tuple(opened.shape), np.dtype(opened.dtype.numpy_dtype), opened.chunk_layout.read_chunk.shape[0]
        )

    @functools.cached_property
    def _files(self) -> Path | zipfile.Path:
        """The root, for reading metadata."""
        return _inside(self.root)

    def _json(self, name: str) -> dict[str, Any]:
        """A metadata file's content; empty if there is no such file."""
        file = self._files / name
        with naming(self.root / name):
            return json.loads(file.read_bytes()) if file.is_file() else {}


def is_zarr(path: str | Path) -> bool:
    """Whether the path is a zarr group: a folder with a group's metadata, or a zip file of one."""
    path = Path(path).expanduser()
    if path.is_file() and not zipfile.is_zipfile(path):
        return False
    files, groups = _inside(path), ("", "data/") if path.is_file() else ("",)
    return any((files / f"{group}{name}").is_file() for group in groups for name in _GROUP_FILES)


def _inside(path: Path) -> Path | zipfile.Path:
    return zipfile.Path(path) if path.is_file() else path


def _walk(folder: Path) -> Iterator[tuple[str, int, int]]:
    """Path, size and time of every file below a folder."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _walk(Path(entry.path))
            else:
                found = entry.stat()
                yield entry.path, found.st_size, found.st_mtime_ns


def _plain(message: str) -> str:
    """tensorstore's message without the internal details that it appends."""
    return message.split(" [")[0].split("; at byte")[0]
