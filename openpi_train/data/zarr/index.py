"""Builds the index of a replay buffer: its columns as memory-mapped arrays, a digest of every episode, what is damaged.

Read next: `data/tables.py` (how the arrays lie on disk), `source.py` (the reader).

    <cache_dir>/<name>-<key>/
      manifest.json          the store's stamp, cameras, dropped episodes, fingerprint, tables with checksums
      tables-<key>/
        episode_ends.npy int64 [episodes]      episode_ids.npy <U32 [episodes]
        first_rows.npy int64 [episodes]        the store's row of each episode's first step
        columns/<name>.npy [steps, ...]        prompt_index.npy int32 [steps]    prompts.json
        frames/<camera>.bin                    the decoded copy: all rows' pictures, uint8, one after the other
"""

import dataclasses
import hashlib
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.data import tables
from openpi_train.data.source import BadRecord
from openpi_train.data.zarr.layout import TASK_ID, Layout, pictures, read_layout
from openpi_train.data.zarr.store import BadChunk, Store

logger = logging.getLogger(__name__)

FORMAT = 1
_REPORT_S = 5.0
_MOST_OF_FREE_DISK = 0.25


def open_index(store: Store, *, cache_dir: Path, decoded_copy: bool | None, check_crc: bool = True) -> tables.Tables:
    """The index of a store: the cached one where it is fresh, else built first by reading every chunk once.

    Raises FileNotFoundError where there is no store, ValueError for one that is no replay buffer, BadRecord where no
    episode is readable, OSError for a cache that cannot be written.
    """
    place = _place(store, cache_dir, decoded_copy)
    manifest = _fresh_manifest(place, store)
    if manifest is None:
        with (
            tables.explain_cache_errors(place, "the source's cache_dir (--...cache-dir)"),
            tables.locked(place, f"index of {store.root.name}"),
        ):
            manifest = _fresh_manifest(place, store) or _build(store, place, decoded_copy)
    return tables.open_tables(place, manifest, check_crc=check_crc)


def is_fresh(store: Store, *, cache_dir: Path, decoded_copy: bool | None) -> bool:
    """Whether `open_index` has nothing to build. Raises as it does for what is no replay buffer."""
    if _fresh_manifest(_place(store, cache_dir, decoded_copy), store) is not None:
        return True
    read_layout(store)
    return False


def _place(store: Store, cache_dir: Path, decoded_copy: bool | None) -> Path:
    options = f"{store.root.resolve()} {store.fill_missing} {decoded_copy}"
    return cache_dir / f"{store.root.name}-{hashlib.sha256(options.encode()).hexdigest()[:12]}"


def _fresh_manifest(place: Path, store: Store) -> dict[str, Any] | None:
    """The manifest, where the store's files are still those that it was built from."""
    manifest = tables.read_manifest(place, format_version=FORMAT)
    if manifest is None or not store.root.exists():
        return None
    if manifest["stamp"] != store.stamp():
        logger.info("%s changed since its index was built: reading it again", store.root)
        return None
    for name, (size, mtime_ns) in manifest["decoded"].items():
        path = place / manifest["tables"] / name
        found = path.stat() if path.is_file() else None
        if found is None or (found.st_size, found.st_mtime_ns) != (size, mtime_ns):
            logger.info("%s was changed or removed: reading the store again", path)
            return None
    return manifest


def _build(store: Store, place: Path, decoded_copy: bool | None) -> dict[str, Any]:
    """Read the whole store and put the new manifest in place."""
    started, stamp = time.monotonic(), store.stamp()
    layout = read_layout(store)
    key = hashlib.sha256(json.dumps([FORMAT, stamp]).encode()).hexdigest()[:12]
    temporary = place / f".tables-{key}.{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    scan, copies = Scan(store, layout), decoded_copy
    if copies is None:
        copies = _copy_is_worth_it(store, layout, place)
    for name in layout.cameras:
        path = temporary / "frames" / f"{name}.bin"
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
    if not good:
        raise BadRecord(f"no readable episode in {store.root}; the first: {dropped[0]['why']}")
    written = _write_tables(temporary, store, layout, scan, good)
    decoded = {
        str(path.relative_to(temporary)): [path.stat().st_size, path.stat().st_mtime_ns]
        for path in temporary.glob("frames/*.bin")
    }
    manifest = {
        "format": FORMAT,
        "dataset": str(store.root),
        "stamp": stamp,
        "cameras": {name: dataclasses.asdict(camera) for name, camera in layout.cameras.items()},
        "decoded": decoded,
        "dropped": dropped,
        **written,
        "tables": tables.put_in_place(temporary, place / f"tables-{key}"),
    }
    # As a later open will read it, so that both see the same.
    published = tables.publish(place, manifest)
    _report(store, layout, published, time.monotonic() - started)
    return published


class Scan:
    """Reads whole arrays in blocks: a digest for every episode, and for which episodes that failed."""

    def __init__(self, store: Store, layout: Layout):
        self._store, self._layout = store, layout
        self._starts = np.concatenate([[0], layout.episode_ends[:-1]])
        self._digests = [hashlib.sha256() for _ in layout.episode_ends]
        self.problems: dict[int, str] = {}

    def episode_id(self, episode: int) -> str:
        """The digest of what was read of an episode."""
        return self._digests[episode].hexdigest()[:32]

    def array(
        self,
        name: str,
        take: Callable[[np.ndarray], Any] = lambda block: None,
        check: Callable[[np.ndarray], bool] = lambda block: True,
        digest: bool = True,
    ) -> None:
        """Read `data/<name>`; `take` gets all its rows in blocks, with zeros for what cannot be read."""
        info, camera = self._store.arrays[f"data/{name}"], self._layout.cameras.get(name)
        if digest:
            shape = (*camera.size, 3) if camera else self._layout.columns[name][1]
            for entry in self._digests:
                entry.update(f"{name} {'uint8' if camera else info.dtype.name} {shape}".encode())
        said = time.monotonic()
        for first, end in info.blocks():
            if time.monotonic() - said > _REPORT_S:
                said = time.monotonic()
                logger.info("%s: %s, %d of %d rows read", self._store.root.name, name, first, info.shape[0])
            pieces = list(self._pieces(name, first, end, check))
            block = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
            take(block)
            for episode in self._touched(first, end) if digest else ():
                mine = slice(max(self._starts[episode] - first, 0), self._layout.episode_ends[episode] - first)
                self._digests[episode].update(np.ascontiguousarray(block[mine]).data)

    def _touched(self, first: int, end: int) -> range:
        """The episodes that have some of these rows."""
        low, high = np.searchsorted(self._layout.episode_ends, [first, end - 1], side="right").tolist()
        return range(low, high + 1)

    def _pieces(self, name: str, first: int, end: int, check: Callable[[np.ndarray], bool]) -> Iterator[np.ndarray]:
        """The rows of a block, as a whole, or where that fails chunk by chunk."""
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
            raise ValueError(f"it holds numbers from {values.min()} to {values.max()}, which cannot be")
        return values

    def _failed(self, name: str, first: int, end: int, error: ValueError) -> np.ndarray:
        hint = ""
        if isinstance(error, BadChunk) and str(error).endswith("is missing"):
            hint = " (if zarr left out chunks of nothing but fill values, set the source's --...fill-missing)"
        for episode in self._touched(first, end):
            self.problems.setdefault(episode, f"data/{name}, rows {first}..{end - 1}: {error}{hint}")
        info, camera = self._store.arrays[f"data/{name}"], self._layout.cameras.get(name)
        shape, dtype = (info.shape[1:], info.dtype) if camera is None else ((*camera.size, 3), np.dtype(np.uint8))
        return np.zeros((end - first, *shape), dtype)


def _write_tables(directory: Path, store: Store, layout: Layout, scan: Scan, good: list[int]) -> dict[str, Any]:
    """Write the tables of all readable episodes; returns what the manifest says about them."""
    starts = np.concatenate([[0], layout.episode_ends[:-1]])[good]
    stops = layout.episode_ends[good]
    ends = np.cumsum(stops - starts)
    steps = int(ends[-1])

    def column(name: str, dtype: Any, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            yield store.read(f"data/{name}", slice(start, stop)).reshape(-1, *shape).astype(dtype, copy=False)

    def write(name: str, dtype: Any, shape: tuple[int, ...], pieces: Any) -> None:
        tables.write_array(directory, name, dtype, shape, pieces)

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
    return {
        "num_episodes": len(good),
        "num_steps": steps,
        "fingerprint": tables.content_fingerprint(directory, prompts, list(layout.cameras)),
        "files": tables.list_files(directory),
    }


def _report(store: Store, layout: Layout, manifest: dict[str, Any], seconds: float) -> None:
    logger.info(
        "%s: index done in %.1f s: %d episodes, %d steps, cameras %s, %d episodes dropped",
        *(store.root.name, seconds, manifest["num_episodes"], manifest["num_steps"]),
        *(list(manifest["cameras"]), len(manifest["dropped"])),
    )
    for name, why in layout.skipped.items():
        logger.info("%s: data/%s is not in the index: %s", store.root.name, name, why)


def _copy_is_worth_it(store: Store, layout: Layout, place: Path) -> bool:
    """Whether reading a picture would decompress others with it, and a decoded copy leaves room on the disk."""
    pictures_of = {name: store.arrays[f"data/{name}"].chunk_rows for name in layout.cameras}
    together = max(pictures_of.values(), default=1)
    if together == 1:
        return False
    copy_bytes = sum(int(layout.episode_ends[-1]) * math.prod(camera.size) * 3 for camera in layout.cameras.values())
    free_bytes = shutil.disk_usage(place).free
    worth = copy_bytes <= _MOST_OF_FREE_DISK * free_bytes
    logger.info(
        "%s: a picture lies in a chunk with %d others; %s (%.1f GiB of %.1f free in %s; --...decoded-copy True or "
        "False decides)", store.root.name, together - 1,
        "all are kept decoded beside the index" if worth else "each row decompresses them, too", copy_bytes / 2**30,
        free_bytes / 2**30, place,
    )  # fmt: skip
    return worth
