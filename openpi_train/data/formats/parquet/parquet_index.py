"""Index of episodes in parquet files, as PaliGemma VLA's trainer reads them: a row per control step.

    <folder>/*.parquet, or one file:
      image_1, image_2, ...   pictures (JPEG, PNG), as bytes; a column with missing ones is left out
      state, action, ...      numbers, or lists of as many in each row
      prompt                  the instruction
      is_first                whether an episode begins; without it every file is an episode

Read next: `formats/sidecar.py` (how an index is kept), `parquet_scan.py` (reads one file), `parquet_source.py`.

    manifest.json             in addition to every index's entries: files with size and mtime
    tables-<key>/
      first_rows.npy int64 [episodes]        the row of each episode's first step in its file
      data_files.npy int32 [episodes]        the file of the manifest that holds it
      spans/<camera>.npy int64 [steps, 2]    byte offset and size in the copied pictures
      pictures/<file>.bin                    the pictures of a file, byte for byte
"""

import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.data.core import image, tables
from openpi_train.data.core.damage import raise_if_system
from openpi_train.data.core.findings import Finding
from openpi_train.data.core.progress import Progress
from openpi_train.data.core.source import Source
from openpi_train.data.formats.parquet.parquet_scan import ScannedFile, scan_file
from openpi_train.data.formats.parquet.parquet_source import ParquetSource
from openpi_train.data.formats.sidecar import IndexedConfig, Sidecar, first_changed, stat_files
from openpi_train.json_object import JsonObject


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parquet(IndexedConfig):
    """Episodes in parquet files on a local or mounted disk; the index takes a copy of each picture, plus columns."""

    # The folder of the files, or one file.
    path: str

    def sidecar(self) -> "ParquetIndex":
        return ParquetIndex(self, Path(self.path).expanduser())


def parquet_files(path: str | Path) -> list[str]:
    """The names of the parquet files in a folder, sorted, or of the file itself; none for other places."""
    where = Path(path).expanduser()
    if where.is_file():
        return [where.name] if where.suffix == ".parquet" else []
    # macOS leaves a file `._a.parquet` beside `a.parquet` on disks of other systems.
    found = where.glob("*.parquet") if where.is_dir() else ()
    return sorted(file.name for file in found if not file.name.startswith("."))


@dataclasses.dataclass(frozen=True)
class ParquetIndex(Sidecar):
    """The index of a dataset."""

    config: Parquet

    dropped_line = "{file}: {why}"

    @property
    def identity(self) -> str:
        return str(self.root.resolve())

    @property
    def folder(self) -> Path:
        """The folder of the files."""
        return self.root.parent if self.root.is_file() else self.root

    def changed(self, manifest: JsonObject) -> str | None:
        names = [name for name, _, _ in manifest["sources"]]
        if names != parquet_files(self.root):
            return str(self.root)
        pictures = ((f"pictures/{name}.bin", *found) for name, found in manifest["pictures"].items())
        return first_changed(self.folder, manifest["sources"]) or first_changed(self.tables_of(manifest), pictures)

    def survey(self) -> list[tuple[str, int, int]]:
        """Name, size and mtime_ns of every file."""
        names = parquet_files(self.root)
        if not names:
            raise FileNotFoundError(f"{self.root} holds no .parquet file")
        return stat_files(self.folder, names, what=f"files of {self.root} are missing", how="Fetch them again.")

    def write(self, directory: Path) -> dict[str, Any]:
        sources, folder = self.survey(), directory / "pictures"
        folder.mkdir()
        progress = Progress(self.label, len(sources), "files")

        def scan(number: int) -> ScannedFile | str:
            progress.add()
            path = self.folder / sources[number][0]
            try:
                return scan_file(path, folder / f"{number}.bin")
            except (OSError, ValueError, KeyError) as error:  # what pyarrow raises for damaged files
                raise_if_system(error, path)
                return str(error)

        found = progress.in_threads(scan, range(len(sources)), os.cpu_count() or 1)
        good = {number: entry for number, entry in enumerate(found) if isinstance(entry, ScannedFile)}
        like = next(iter(good.values()), None)
        dropped = [
            {"file": name, "why": found[number]} for number, (name, _, _) in enumerate(sources) if number not in good
        ]
        for number, entry in good.items():
            if like is not None and entry.layout != like.layout:
                first = sources[next(iter(good))][0]
                raise ValueError(
                    f"{self.folder / sources[number][0]} has other columns than {self.folder / first}: "
                    f"{entry.layout} and {like.layout}; put them in folders of their own"
                    f"{''.join(f'. {name} is left out of one: {why}' for name, why in _differing(entry, like))}"
                )
        self.require_episodes(len(good), dropped)
        _write_tables(directory, good)
        pictures = {path.stem: path.stat() for path in directory.glob("pictures/*.bin")}
        return {
            "sources": sources,
            "cameras": {name: _size(directory, good, name) for name in (like.spans if like else ())},
            "pictures": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in pictures.items()},
            "dropped": dropped,
            "skipped": dict(like.skipped) if like else {},
            "findings": [finding.as_json() for finding in _grey(directory, good, self.folder / sources[0][0])],
        }

    def source(self, index: tables.Tables) -> Source:
        return ParquetSource(self.folder, index)


def _differing(one: ScannedFile, other: ScannedFile) -> Iterator[tuple[str, str]]:
    """The columns that are left out of only one of two files, each with the reason."""
    for mine, others in ((one, other), (other, one)):
        yield from ((name, why) for name, why in mine.skipped.items() if name not in others.skipped)


def _grey(directory: Path, good: Mapping[int, ScannedFile], where: Path) -> list[Finding]:
    """A finding for each camera with grey pictures."""
    cameras = next(iter(good.values())).spans
    return [
        image.grey_camera(name, str(where)) for name in cameras
        if image.is_grey(image.pixel_mode(_first(directory, good, name)))
    ]  # fmt: skip


def _size(directory: Path, good: Mapping[int, ScannedFile], camera: str) -> Sequence[int]:
    """Height and width of a camera's first picture. Raises ValueError if it is none."""
    return image.image_size(_first(directory, good, camera))


def _first(directory: Path, good: Mapping[int, ScannedFile], camera: str) -> bytes:
    """A camera's first picture."""
    number, entry = next(iter(good.items()))
    offset, length = entry.spans[camera][0].tolist()
    with (directory / "pictures" / f"{number}.bin").open("rb") as file:
        file.seek(offset)
        return file.read(length)


def _write_tables(directory: Path, good: Mapping[int, ScannedFile]) -> None:
    """Write the tables of all readable files."""
    entries = list(good.values())
    lengths = [np.diff([*entry.starts, len(entry.prompts)]) for entry in entries]
    ends = np.cumsum(np.concatenate(lengths))
    episodes, steps = len(ends), int(ends[-1])
    texts = {text: number for number, text in enumerate(dict.fromkeys(text for one in entries for text in one.prompts))}
    write = functools.partial(tables.write_array, directory)
    write("episode_ends", np.int64, (episodes,), [ends])
    write("episode_ids", "<U32", (episodes,), (entry.digests for entry in entries))
    write("first_rows", np.int64, (episodes,), (entry.starts for entry in entries))
    files = ([number] * len(entry.starts) for number, entry in good.items())
    write("data_files", np.int32, (episodes,), files)
    write("prompt_index", np.int32, (steps,), ([texts[text] for text in entry.prompts] for entry in entries))
    for name, column in entries[0].columns.items():
        write(f"columns/{name}", column.dtype, (steps, *column.shape[1:]), (entry.columns[name] for entry in entries))
    for name in entries[0].spans:
        write(f"spans/{name}", np.int64, (steps, 2), (entry.spans[name] for entry in entries))
    tables.write_prompts(directory, list(texts))
