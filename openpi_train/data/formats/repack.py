"""Repacking of a source into ArrayRecord files with one record per step, for remote or slow storage.

Read next: `core/tables.py` (columns and prompts beside the records), `rlds/rlds_source.py` (the original format).

One record holds all cameras' pictures of one step, byte for byte as in the source: a step needs one read
however many cameras a robot has. Columns, prompts and digests are copied, so the fingerprint stays the same.

    <directory>/manifest.json      tables/ as in an index
    <directory>/steps-00000.array_record ...   a record: one uint32 length per camera, then the pictures
"""

import dataclasses
import errno
import functools
import logging
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.data.core import files, findings, image, tables
from openpi_train.data.core.damage import of_record, system_errno
from openpi_train.data.core.progress import Progress
from openpi_train.data.core.source import About, Source, SourceConfig
from openpi_train.data.formats.stored import StoredSource
from openpi_train.json_object import JsonObject
from openpi_train.runtime import locks

logger = logging.getLogger(__name__)

FORMAT = 1
# No read-ahead and no threads: both only slow down random access.
_READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
# JPEG and PNG do not compress further; groups of one record allow single reads.
_WRITER_OPTIONS = "group_size:1,uncompressed"
# Steps cached after reading, so that the second camera of a step needs no second read.
_RECENT_STEPS = 64
_OPEN_FILES = 256


def repack(source: Source, directory: str | Path, *, split: str | None = None, steps_per_file: int = 4096) -> Path:
    """Write a whole source to `directory`, and return it. `split`, the source's split, is recorded.

    A killed run is resumed by calling again: finished files are kept in `<directory>.partial` until all are written.

    Raises FileExistsError if `directory` exists, BadRecord for a step that cannot be read, OSError (disk full).
    """
    final = Path(directory).expanduser()
    if final.exists():
        raise FileExistsError(f"{final} exists already; choose another directory, or move it aside first")
    if source.num_steps == 0:
        raise ValueError("the source has no steps to repack")
    partial = final.with_name(final.name + ".partial")
    plan = {
        "fingerprint": source.fingerprint,
        "split": split,
        "cameras": list(source.cameras),
        "steps_per_file": steps_per_file,
    }
    with (
        tables.explain_cache_errors(final.parent, "the directory to repack to"),
        locks.held(partial / tables.LOCK, f"repack of {final}"),
    ):
        if final.exists():
            raise FileExistsError(f"{final} was finished by another process meanwhile")
        files.claim(partial, plan)
        num_files = _write_files(source, partial, steps_per_file)
        _write_tables(source, partial, plan, num_files)
        os.replace(partial, final)
        # Only now: a kill before this would leave finished files of unknown origin.
        (final / files.PLAN).unlink()
        (final / tables.LOCK).unlink()
    return final


def _write_files(source: Source, partial: Path, steps_per_file: int) -> int:
    """Write the missing ArrayRecord files; returns the total number of files."""
    starts = range(0, source.num_steps, steps_per_file)
    missing = [index for index in range(len(starts)) if not (partial / _file_name(index)).is_file()]
    logger.info("repack: %d of %d files to write, %d steps in all", len(missing), len(starts), source.num_steps)
    progress = Progress("repack", len(missing), "files")
    for index in missing:
        steps = range(starts[index], min(starts[index] + steps_per_file, source.num_steps))
        _write_file(source, partial / _file_name(index), steps)
        progress.add()
    return len(starts)


def _write_file(source: Source, path: Path, steps: range) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    temporary = path.with_suffix(".tmp")
    try:
        writer = ArrayRecordWriter(str(temporary), _WRITER_OPTIONS)
        for step in steps:
            writer.write(_pack([source.encoded(step, camera) for camera in source.cameras]))
        writer.close()
    except RuntimeError as error:  # the only exception of array_record
        full = "No space left" in str(error)
        raise OSError(errno.ENOSPC if full else errno.EIO, f"cannot write {temporary}: {error}") from error
    os.replace(temporary, path)


def _write_tables(source: Source, partial: Path, plan: JsonObject, num_files: int) -> None:
    directory = partial / "tables"
    arrays = {name: np.asarray(getattr(source, name)) for name in ("episode_ends", "prompt_index", "episode_ids")}
    tables.write_arrays(directory, arrays | {f"columns/{name}": column for name, column in source.columns.items()})
    tables.write_prompts(directory, source.prompts)
    sizes = {camera: list(image.image_size(source.encoded(0, camera))) for camera in source.cameras}
    manifest = {
        "format": FORMAT,
        **plan,
        "cameras": sizes,
        "about": source.about().as_json(),
        "findings": [finding.as_json() for finding in source.findings],
        "num_files": num_files,
        "num_steps": source.num_steps,
        "num_episodes": source.num_episodes,
        "tables": directory.name,
        "files": tables.list_files(directory),
        "records": {_file_name(index): (partial / _file_name(index)).stat().st_size for index in range(num_files)},
    }
    files.write_json(partial / tables.MANIFEST, manifest)


def _file_name(index: int) -> str:
    return f"steps-{index:05d}.array_record"


def _pack(pictures: list[bytes]) -> bytes:
    return struct.pack(f"<{len(pictures)}I", *map(len, pictures)) + b"".join(pictures)


def _unpack(record: bytes, count: int) -> list[bytes]:
    lengths = struct.unpack_from(f"<{count}I", record)
    offset, pictures = 4 * count, []
    for length in lengths:
        pictures.append(record[offset : offset + length])
        offset += length
    if offset != len(record):
        raise ValueError(f"the record has {len(record)} bytes, its lengths add up to {offset}")
    return pictures


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepArray(SourceConfig):
    """A dataset that `repack` wrote."""

    # The directory that `repack` wrote.
    path: str
    # The split that must have been repacked; None accepts any.
    split: str | None = None
    # Verify the checksums of columns and prompts when they are opened.
    check_crc: bool = True

    def open(self) -> "StepArraySource":
        """Open it. Raises FileNotFoundError if there is none, ValueError if a file is missing or damaged."""
        root, manifest = Path(self.path).expanduser(), self._manifest()
        for name, size in manifest["records"].items():
            found = (root / name).stat().st_size if (root / name).is_file() else None
            if found != size:
                raise ValueError(f"{root / name} is truncated or missing ({found} of {size} bytes); copy it again")
        source = StepArraySource(root, tables.open_tables(root, manifest, check_crc=self.check_crc))
        findings.report(str(root), source.findings)
        return source

    def is_ready(self) -> bool:
        """Whether `open` can start at once; always so, as there is no index to build."""
        return bool(self._manifest())

    def _manifest(self) -> dict[str, Any]:
        root = Path(self.path).expanduser()
        manifest = tables.read_manifest(root)
        if manifest is None or manifest.get("format") != FORMAT:
            raise FileNotFoundError(f"{root} holds no repacked dataset (no {tables.MANIFEST} of format {FORMAT})")
        if self.split not in (None, manifest["split"]):
            raise ValueError(f"{root} holds split {manifest['split']!r}, not {self.split!r}; repack that one too")
        return manifest


def is_repacked(path: str | Path) -> bool:
    """Whether the directory is one that `repack` wrote."""
    manifest = tables.read_manifest(Path(path).expanduser())
    return manifest is not None and manifest.get("format") == FORMAT


class StepArraySource(StoredSource):
    """An opened repacked dataset: the same steps, columns and frames as the source it was made from."""

    def __init__(self, root: Path, stored: tables.Tables):
        super().__init__(root, stored)
        self._manifest = stored.manifest
        self._recent = functools.lru_cache(maxsize=_RECENT_STEPS)(self._pictures)

    def encoded(self, step: int, camera: str) -> bytes:
        self.check(step, camera)
        return self._recent(step)[self.cameras.index(camera)]

    def about(self) -> About:
        return About.from_json(self._manifest.get("about", {}))

    def describe(self, step: int) -> str:
        file, record = divmod(step, self._manifest["steps_per_file"])
        return f"{self._root / _file_name(file)}, record {record}, {self.place_of(step)}"

    def _pictures(self, step: int) -> list[bytes]:
        file, record = divmod(step, self._manifest["steps_per_file"])
        try:
            try:
                (data,) = _reader(self._root / _file_name(file), self._manifest["fingerprint"]).read([record])
            except RuntimeError as error:
                if system_errno(error) is None:
                    raise
                # A reader that failed once fails for ever; see `read_span`.
                _reader.cache_clear()
                (data,) = _reader(self._root / _file_name(file), self._manifest["fingerprint"]).read([record])
            return _unpack(data, len(self.cameras))
        except (RuntimeError, IndexError, ValueError, struct.error) as error:
            raise of_record(error, self.describe(step)) from error


@functools.lru_cache(maxsize=_OPEN_FILES)
def _reader(path: Path, fingerprint: str) -> Any:
    """This process's reader of a file; the fingerprint distinguishes datasets that replaced each other at one path."""
    from array_record.python.array_record_module import ArrayRecordReader

    return ArrayRecordReader(str(path), _READER_OPTIONS)
