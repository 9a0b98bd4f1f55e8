"""Writes a replay buffer block by block, so that a kill loses at most one block, and verifies it by reading it back.

The store is zarr format 2, which every release of diffusion_policy and RoboTwin reads. Until it is complete it is in
`<name>.unfinished`, with a journal of the written blocks. Read next: `merge.py` and `robotwin_recordings.py`,
the callers.
"""

import contextlib
import dataclasses
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import google_crc32c
import numpy as np

from openpi_train.data.core import files, tables
from openpi_train.data.core.progress import Progress
from openpi_train.data.formats.zarr.store import EPISODE_ENDS, ArrayInfo, Store
from openpi_train.data.formats.zarr.zarr_layout import TASK_ID, TASKS
from openpi_train.runtime import locks

logger = logging.getLogger(__name__)

_JOURNAL = "journal.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contents:
    """The contents of a store to write.

    Attributes:
        arrays: The arrays in data/, by name, without `task_id`.
        read: Returns rows first..end-1 of an array by name, in its dtype. Called in order, block by block.
        episode_ends: int64 [episodes].
        tasks: name and prompt of each task; `task_ids` has the task of each episode, or of each row.
        identity: What the contents depend on, as JSON by name; only an attempt with an equal identity is continued.
        attributes: The root's attributes besides the tasks.
    """

    arrays: Mapping[str, ArrayInfo]
    read: Callable[[str, int, int], np.ndarray]
    episode_ends: np.ndarray
    tasks: Sequence[tuple[str, str]]
    task_ids: np.ndarray
    identity: Mapping[str, Any]
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@runtime_checkable
class ArrayPart(Protocol):
    """A part of an array: some of its rows, numbered from 0."""

    rows: int

    def read(self, name: str, first: int, end: int) -> np.ndarray:
        """Rows first..end-1 of an array by name."""
        ...


def read_across(parts: Iterable[ArrayPart], name: str, first: int, end: int) -> np.ndarray:
    """Rows first..end-1 of an array that is the concatenation of all parts."""
    pieces, begin = [], 0
    for part in parts:
        low, high = max(first - begin, 0), min(end - begin, part.rows)
        if low < high:
            pieces.append(part.read(name, low, high))
        begin += part.rows
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def write_store(contents: Contents, out: Path) -> None:
    """Write the store `out`, continuing an interrupted attempt, and verify it by checksums.

    Raises FileExistsError if `out` exists, ValueError if the unfinished store has another identity or does not read
    back as it was written, OSError if it cannot be written.
    """
    if out.exists():
        raise FileExistsError(f"{out} exists already: give another target, or remove it")
    work = out.with_name(f"{out.name}.unfinished")
    with tables.explain_cache_errors(work, "--out"), locks.held(work / tables.LOCK, f"writing {out.name}"):
        arrays = {name: [list(info.shape), info.dtype.str, info.chunk_rows] for name, info in contents.arrays.items()}
        if files.claim(work, {**contents.identity, "arrays": arrays}):
            logger.info("continuing %s", work)
        writer = _Writer(work, contents)
        writer.copy()
        ends = contents.episode_ends
        _write_array(work, EPISODE_ENDS, ArrayInfo(ends.shape, ends.dtype, len(ends)), [(0, ends)])
        tasks = [{"name": name, "prompt": prompt} for name, prompt in contents.tasks]
        files.write_json(work / ".zattrs", {**contents.attributes, TASKS: tasks})
        for group in ("", "data", "meta"):
            files.write_json(work / group / ".zgroup", {"zarr_format": 2})
        writer.verify()
        for name in (files.PLAN, _JOURNAL, tables.LOCK):
            (work / name).unlink()
        work.rename(out)


class _Writer:
    """Copies and verifies the arrays of a store in blocks."""

    def __init__(self, work: Path, contents: Contents):
        rows = int(contents.episode_ends[-1])
        task_id = ArrayInfo((rows,), np.dtype(np.int32), max(info.chunk_rows for info in contents.arrays.values()))
        self.work, self.contents = work, contents
        self.arrays = {**contents.arrays, TASK_ID: task_id}
        self.total_mb = sum(info.shape[0] * info.row_bytes for info in self.arrays.values()) / 1e6
        self.done = self._read_journal()

    def copy(self) -> None:
        """Write the blocks that the journal does not list yet."""
        progress = Progress(f"writing {self.work.stem}", self.total_mb, "MB")
        with (self.work / _JOURNAL).open("a", encoding="utf-8") as journal:
            journal.write("\n")  # after a line that a kill may have cut short
            for name, info in self.arrays.items():
                _write_array(self.work, f"data/{name}", info, self._missing(name, progress), self._note(journal, name))

    def verify(self) -> None:
        """Read everything back. Raises ValueError naming rows that differ from what was written."""
        store, progress = Store(self.work), Progress(f"verifying {self.work.stem}", self.total_mb, "MB")
        for (name, first, end), crc in self.done.items():
            if _crc(store.read(f"data/{name}", slice(first, end))) != crc:
                raise ValueError(
                    f"{self.work}: rows {first}..{end - 1} of data/{name} differ from what was written; check the "
                    "disk, remove the folder and start again"
                )
            progress.add((end - first) * self.arrays[name].row_bytes / 1e6)

    def _missing(self, name: str, progress: Progress) -> Iterator[tuple[int, np.ndarray]]:
        info = self.arrays[name]
        for first, end in info.blocks():
            if (name, first, end) not in self.done:
                values = np.ascontiguousarray(self._rows(name, first, end))
                assert values.shape == (end - first, *info.shape[1:]) and values.dtype == info.dtype
                yield first, values
            progress.add((end - first) * info.row_bytes / 1e6)

    def _rows(self, name: str, first: int, end: int) -> np.ndarray:
        if name != TASK_ID:
            return self.contents.read(name, first, end)
        if len(self.contents.task_ids) == self.contents.episode_ends[-1]:
            return self.contents.task_ids[first:end].astype(np.int32)
        episodes = np.searchsorted(self.contents.episode_ends, np.arange(first, end), side="right")
        return self.contents.task_ids[episodes].astype(np.int32)

    def _note(self, journal: Any, name: str) -> Callable[[int, np.ndarray], None]:
        def note(first: int, values: np.ndarray) -> None:
            place, crc = (name, first, first + len(values)), _crc(values)
            journal.write(json.dumps([*place, crc]) + "\n")
            journal.flush()
            os.fsync(journal.fileno())
            self.done[place] = crc

        return note

    def _read_journal(self) -> dict[tuple[str, int, int], int]:
        done = {}
        path = self.work / _JOURNAL
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
            try:
                name, first, end, crc = json.loads(line)
            except ValueError:  # cut short by a kill: its block is written again
                continue
            done[name, first, end] = crc
        return done


def _write_array(
    work: Path,
    name: str,
    info: ArrayInfo,
    blocks: Iterable[tuple[int, np.ndarray]],
    note: Callable[[int, np.ndarray], None] = lambda first, values: None,
) -> None:
    """Write blocks (first row, values) of an array, creating it if needed; calls `note` after each."""
    import tensorstore

    metadata = {
        "zarr_format": 2,
        "shape": list(info.shape),
        "chunks": [info.chunk_rows, *info.shape[1:]],
        "dtype": info.dtype.str,
        "fill_value": False if info.dtype == bool else 0,
        "compressor": {"id": "blosc", "cname": "zstd", "clevel": 3, "shuffle": 1},
    }
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": f"{work.resolve()}/{name}/"},
        "metadata": metadata,
        # Write every chunk, so that a chunk without a file is a lost one.
        "store_data_equal_to_fill_value": True,
    }
    with _disk_errors(work, name):
        array = tensorstore.open(spec, create=True, open=True).result()
    for first, values in blocks:
        with _disk_errors(work, name):
            array[first : first + len(values)].write(values).result()
        note(first, values)


@contextlib.contextmanager
def _disk_errors(work: Path, name: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:  # tensorstore raises it for a full disk, too
        raise OSError(
            f"cannot write {work}/{name}: {error}. Make room or give another target; the same command continues"
        ) from error


def _crc(values: np.ndarray) -> int:
    return google_crc32c.value(values.tobytes())
