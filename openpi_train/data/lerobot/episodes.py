"""Scans one parquet file of a LeRobot dataset and its episodes' videos into small arrays, and copies pictures out.

Read next: `lerobot_video.py` (where frames are), `lerobot_index.py` (joins the files).
"""

import dataclasses
import hashlib
import math
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.data.lerobot.lerobot_layout import Clip, Episode, LeRobotLayout, require
from openpi_train.data.lerobot.lerobot_video import Video

# Relabelling changes these (`next.reward`, `next.done`) but not observations and actions.
_RELABELLED = "next."
_PICTURES_AT_ONCE = 256


@dataclasses.dataclass(frozen=True)
class Scanned:
    """The index entries of one episode. `problem` says why it cannot be used; the rest is then empty.

    `spans` has two numbers for each camera and step: first and own packet in the video, or offset and length
    in the file of copied pictures.
    """

    episode: Episode
    problem: str = ""
    digest: str = ""
    columns: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    spans: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    tasks: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    # Median difference of the timestamps of two steps; NaN for one step.
    period_s: float = math.nan


class ParquetScan:
    """Reads the episodes of a dataset's parquet files, and looks up their frames in scanned videos."""

    def __init__(self, layout: LeRobotLayout, videos: Mapping[str, Video], tolerance_s: float):
        self.layout, self.videos, self.tolerance_s = layout, videos, tolerance_s

    def read(self, file: str, pictures: Path) -> list[Scanned]:
        """All episodes of a file, damaged ones with their problem; its pictures are copied to `pictures`."""
        episodes = self.layout.data[file]
        try:
            rows = self._rows(file, pictures)
        except (OSError, KeyError, ValueError) as error:  # what pyarrow raises for truncated and damaged files
            return [Scanned(episode, problem=f"the file cannot be read: {error}") for episode in episodes]
        result = []
        for episode in episodes:
            try:
                result.append(self._episode(episode, rows))
            except ValueError as error:
                result.append(Scanned(episode, problem=str(error)))
        return result

    def _rows(self, file: str, pictures: Path) -> dict[str, Any]:
        """The columns of a file by feature name; for a picture, its span and digest."""
        details = dict.fromkeys(("episode_index", "frame_index", "task_index"), ("int64", ()))
        details |= {"timestamp": ("float64", ()), **self.layout.columns}
        with require("pyarrow.parquet").ParquetFile(self.layout.root / file) as parquet:
            names = [name for name, camera in self.layout.cameras.items() if not camera.is_video]
            lacking = {*details, *names} - set(parquet.schema_arrow.names)
            if lacking:
                raise ValueError(f"it lacks {', '.join(sorted(lacking))}, which the dataset's metadata list")
            table = parquet.read(columns=list(details))
            rows: dict[str, Any] = {name: numbers(table[name], *detail) for name, detail in details.items()}
            if names:
                rows |= copy_pictures(parquet, names, pictures)
        return rows

    def _episode(self, episode: Episode, rows: Mapping[str, Any]) -> Scanned:
        """Scan one episode. Raises ValueError if file, metadata and videos do not agree."""
        mine = np.flatnonzero(rows["episode_index"] == episode.number)
        if len(mine) != episode.length:
            raise ValueError(f"the file has {len(mine)} of its steps; the metadata say {episode.length}")
        if not len(mine) or not np.array_equal(rows["frame_index"][mine], np.arange(len(mine))):
            raise ValueError("its steps are not numbered 0, 1, 2, ...")
        unknown = set(rows["task_index"][mine].tolist()) - set(self.layout.tasks)
        if unknown:
            raise ValueError(f"its task {min(unknown)} is not among the dataset's tasks")
        digest, spans, columns = hashlib.sha256(), {}, {}
        for name, camera in self.layout.cameras.items():
            if camera.is_video:
                spans[name] = self._frames(episode.clips[name], rows["timestamp"][mine], digest)
            else:
                spans[name], digests = (values[mine] for values in rows[name])
                digest.update(digests.tobytes())
        for name in self.layout.columns:
            columns[name] = rows[name][mine]
            if not name.startswith(_RELABELLED):
                digest.update(f"{name} {columns[name].dtype} {columns[name].shape}".encode())
                digest.update(columns[name].tobytes())
        periods = np.diff(rows["timestamp"][mine])
        return Scanned(
            episode, digest=digest.hexdigest()[:32], columns=columns, spans=spans, tasks=rows["task_index"][mine],
            period_s=float(np.median(periods)) if len(periods) else math.nan,
        )  # fmt: skip

    def _frames(self, clip: Clip, times: np.ndarray, digest: Any) -> np.ndarray:
        """The packets of a clip's frames at these times (s), int64 [steps, 2]; adds their bytes to the digest."""
        video = self.videos[clip.file]
        if video.problem:
            raise ValueError(f"{clip.file}: {video.problem}")
        times = times + clip.start_s
        found = video.find(times, self.tolerance_s)
        if found.min() < 0:
            step = int(np.argmin(found))
            raise ValueError(
                f"{clip.file} has no frame within {self.tolerance_s} s of {times[step]:.4f} s, step {step}; "
                f"it has {len(video.times)} frames"
            )
        frames = video.frames[found]
        path = self.layout.root / clip.file
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            for offset, size, _ in video.packets[frames[:, 1]].tolist():
                digest.update(size.to_bytes(8, "little"))
                digest.update(content[offset : offset + size])
        return frames


def numbers(column: Any, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """A parquet column, nested or not, as [rows, *shape]. Raises ValueError if it holds something else."""
    num_rows, array = len(column), column.combine_chunks()
    while hasattr(array, "flatten") and hasattr(array.type, "value_type"):
        array = array.flatten()
    if array.null_count:
        raise ValueError(f"{array.null_count} numbers are missing")
    return np.asarray(array.to_numpy(zero_copy_only=False), dtype).reshape(num_rows, *shape)


def copy_pictures(parquet: Any, names: Sequence[str], out: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Copy all pictures to a file in which each can be read alone; returns spans and digests by feature and row.

    A picture is bytes, or a structure with an entry `bytes`. Raises ValueError if one is missing.

    Parquet compresses whole pages, so reading one picture from it would decompress many.
    """
    found: dict[str, list[tuple[int, int, bytes]]] = {name: [] for name in names}
    with out.open("wb") as file:
        for batch in parquet.iter_batches(batch_size=_PICTURES_AT_ONCE, columns=list(names)):
            for name in names:
                column = batch.column(batch.schema.names.index(name))
                for picture in column.field("bytes") if hasattr(column, "field") else column:
                    if not picture.is_valid:
                        raise ValueError(f"{name} is stored in separate files, not in the parquet file")
                    data = picture.as_py()
                    found[name].append((file.tell(), len(data), hashlib.sha256(data).digest()))
                    file.write(data)
    return {
        name: (np.array([row[:2] for row in rows], np.int64), np.array([row[2] for row in rows]))
        for name, rows in found.items()
    }
