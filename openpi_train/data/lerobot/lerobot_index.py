"""Index of a LeRobot dataset: the location of every frame, and all low-dimensional data, as arrays.

Read next: `data/sidecar.py` (how an index is kept), `episodes.py` (reads one file), `lerobot_source.py` (the source).

    manifest.json            in addition to every index's entries: files with size and mtime, encodings of videos
    tables-<key>/
      records.npy int64 [episodes]           number of each episode in the dataset
      data_files.npy int32 [episodes]        the file of the manifest that holds its columns
      files/<camera>.npy int32 [episodes]    the file that holds its frames
      packets.npy int64 [packets, 3]         byte offset, size and presentation time of every packet of all videos
      spans/<camera>.npy int64 [steps, 2]    first and own packet; for pictures byte offset and length
      pictures/<file>.bin                    the pictures of a parquet file, byte for byte
"""

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.data import tables
from openpi_train.data.files import read_json
from openpi_train.data.lerobot import lerobot_video
from openpi_train.data.lerobot.contradictions import other_rates, without_deep_cameras
from openpi_train.data.lerobot.episodes import ParquetScan, Scanned
from openpi_train.data.lerobot.lerobot_layout import INFO_FILE, LeRobotLayout, read_layout
from openpi_train.data.lerobot.lerobot_source import LeRobotSource
from openpi_train.data.progress import Progress
from openpi_train.data.sidecar import IndexedConfig, Sidecar, first_changed, stat_files
from openpi_train.data.source import Source, column_name


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeRobot(IndexedConfig):
    """A LeRobot dataset on a local or mounted disk. Dots in feature names become slashes, as in RLDS.

    Its index takes 40 bytes per video frame, or a copy of each picture, plus the columns.
    """

    # The folder that holds meta/, data/ and videos/.
    path: str
    # Maximum difference between a video frame's time and its step's timestamp.
    tolerance_s: float = 1e-4
    # Number of threads that build the index; 0: one per CPU.
    build_workers: int = 0

    def sidecar(self) -> "LeRobotIndex":
        return LeRobotIndex(self, Path(self.path).expanduser())


@dataclasses.dataclass(frozen=True)
class LeRobotIndex(Sidecar):
    """The index of a dataset."""

    config: LeRobot

    dropped_line = "{file}, episode {episode}: {why}"

    @property
    def identity(self) -> str:
        return f"{self.root.resolve()} {self.config.tolerance_s}"

    def changed(self, manifest: Mapping[str, Any]) -> str | None:
        pictures = ((f"pictures/{name}.bin", *found) for name, found in manifest["pictures"].items())
        return first_changed(self.root, manifest["sources"]) or first_changed(self.tables_of(manifest), pictures)

    def survey(self) -> tuple[LeRobotLayout, list[tuple[str, int, int]]]:
        """The layout, and name, size and mtime_ns of every file."""
        layout = read_layout(self.root)
        names = [*layout.metadata, *layout.data, *layout.videos]
        return layout, stat_files(self.root, names, what=f"files of {self.root} are missing", how="Download them.")

    def write(self, directory: Path) -> dict[str, Any]:
        layout, sources = self.survey()
        number = {name: index for index, (name, _, _) in enumerate(sources)}
        videos, scanned = self._scan(layout, directory / "pictures", number)
        dropped = [
            {"file": entry.episode.data, "episode": entry.episode.number, "why": entry.problem}
            for entry in scanned
            if entry.problem
        ]
        good = sorted((entry for entry in scanned if not entry.problem), key=lambda entry: entry.episode.number)
        self.require_episodes(len(good), dropped)
        layout, findings = without_deep_cameras(layout, good, videos, directory / "pictures", number)
        findings += other_rates(read_json(self.root / INFO_FILE).get("fps"), good)
        _write_tables(directory, layout, good, videos, number)
        encodings = list(dict.fromkeys(entry.encoding for entry in videos.values() if entry.encoding))
        pictures = {path.stem: path.stat() for path in directory.glob("pictures/*.bin")}
        return {
            "sources": sources,
            "cameras": {column_name(name): list(camera.size) for name, camera in layout.cameras.items()},
            "encodings": [dataclasses.asdict(encoding) for encoding in encodings],
            "encoding_of": {
                str(number[name]): encodings.index(entry.encoding) for name, entry in videos.items() if entry.encoding
            },
            "pictures": {name: [found.st_size, found.st_mtime_ns] for name, found in pictures.items()},
            "dropped": dropped,
            "skipped": dict(layout.skipped),
            "findings": [finding.as_json() for finding in findings],
        }

    def source(self, index: tables.Tables) -> Source:
        return LeRobotSource(self.root, index)

    def _scan(
        self, layout: LeRobotLayout, pictures: Path, number: Mapping[str, int]
    ) -> tuple[dict[str, lerobot_video.Video], list[Scanned]]:
        """Scan all videos, by file, and all episodes; pictures in parquet files are copied."""
        pictures.mkdir()
        progress = Progress(self.label, len(layout.videos) + len(layout.data), "files")
        threads = self.config.build_workers or os.cpu_count() or 1

        def scan_video(file: str) -> lerobot_video.Video:
            progress.add()
            return lerobot_video.scan(self.root / file)

        videos = dict(zip(layout.videos, progress.in_threads(scan_video, layout.videos, threads), strict=True))
        scan = ParquetScan(layout, videos, self.config.tolerance_s)

        def scan_file(file: str) -> list[Scanned]:
            progress.add()
            return scan.read(file, pictures / f"{number[file]}.bin")

        parts = progress.in_threads(scan_file, list(layout.data), threads)
        return videos, [entry for part in parts for entry in part]


def _write_tables(
    directory: Path,
    layout: LeRobotLayout,
    good: Sequence[Scanned],
    videos: Mapping[str, lerobot_video.Video],
    number: Mapping[str, int],
) -> None:
    """Write the tables of all readable episodes."""
    ends = np.cumsum([entry.episode.length for entry in good])
    episodes, steps = len(good), int(ends[-1])
    sizes = [len(entry.packets) for entry in videos.values()]
    first_packet = dict(zip(videos, np.cumsum([0, *sizes]).tolist(), strict=False))
    texts = {text: index for index, text in enumerate(dict.fromkeys(layout.tasks.values()))}
    prompt_of = np.zeros(max(layout.tasks) + 1, np.int32)
    prompt_of[list(layout.tasks)] = [texts[text] for text in layout.tasks.values()]

    write = functools.partial(tables.write_array, directory)
    write("episode_ends", np.int64, (episodes,), [ends])
    write("episode_ids", "<U32", (episodes,), [[entry.digest for entry in good]])
    write("records", np.int64, (episodes,), [[entry.episode.number for entry in good]])
    write("prompt_index", np.int32, (steps,), (prompt_of[entry.tasks] for entry in good))
    write("data_files", np.int32, (episodes,), [[number[entry.episode.data] for entry in good]])
    write("packets", np.int64, (sum(sizes), 3), (entry.packets for entry in videos.values()))
    for name, camera in layout.cameras.items():
        files = [entry.episode.clips[name].file if camera.is_video else entry.episode.data for entry in good]
        shifts = [first_packet[file] if camera.is_video else 0 for file in files]
        spans = (entry.spans[name] + shift for entry, shift in zip(good, shifts, strict=True))
        write(f"files/{column_name(name)}", np.int32, (episodes,), [[number[file] for file in files]])
        write(f"spans/{column_name(name)}", np.int64, (steps, 2), spans)
    for name, (dtype, shape) in layout.columns.items():
        pieces = (entry.columns[name] for entry in good)
        write(f"columns/{column_name(name)}", dtype, (steps, *shape), pieces)
    tables.write_prompts(directory, list(texts))
