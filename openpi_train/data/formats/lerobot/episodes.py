"""Scans one parquet file of a LeRobot dataset and its episodes' videos into small arrays, and copies pictures out.

Read next: `lerobot_video.py` (where frames are), `parquet_numbers.py`, `language_rows.py`, `lerobot_index.py` (joins
the files).
"""

import dataclasses
import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.data.core import image
from openpi_train.data.core.damage import raise_if_system
from openpi_train.data.core.files import naming
from openpi_train.data.formats.lerobot import language_rows
from openpi_train.data.formats.lerobot.lerobot_layout import LeRobotLayout
from openpi_train.data.formats.lerobot.lerobot_metadata import Clip, Episode, require
from openpi_train.data.formats.lerobot.lerobot_video import Video
from openpi_train.data.formats.lerobot.parquet_numbers import amount, numbers

# Relabelling changes these (`next.reward`, `next.done`) but not observations and actions.
_RELABELLED = "next."
_PICTURES_AT_ONCE = 256
# The columns that every file has besides the features.
_NUMBERING = {"episode_index": "int64", "frame_index": "int64", "task_index": "int64", "timestamp": "float64"}


@dataclasses.dataclass(frozen=True)
class Scanned:
    """The index entries of one episode. `problem` says why it cannot be used; the rest is then empty.

    Attributes:
        columns, spans: those that the episode's file has. `spans` has two numbers for each camera and step: first and
            own packet in the video, or offset and length in the file of copied pictures.
        sizes: height and width of the first picture of each camera whose pictures are in the file.
        tasks: the number of each step's task.
        texts: the text that stands in for the task's at each step, None where none does; empty if none is wanted.
        styles: the styles of the episode's language rows.
    """

    episode: Episode
    problem: str = ""
    digest: str = ""
    columns: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    spans: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    sizes: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    tasks: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    texts: Sequence[str | None] = ()
    styles: Collection[str] = ()
    # Median difference of the timestamps of two steps; NaN for one step.
    period_s: float = math.nan


@dataclasses.dataclass(frozen=True)
class _Rows:
    """The rows of a file: `columns` with the `counts` of numbers in each row; spans and digests of `pictures`."""

    columns: Mapping[str, np.ndarray]
    counts: Mapping[str, np.ndarray]
    pictures: Mapping[str, tuple[np.ndarray, np.ndarray]]
    sizes: Mapping[str, tuple[int, int]]
    language: Any = None


class ParquetScan:
    """Reads the episodes of a dataset's parquet files, and looks up their frames in scanned videos.

    Args: `sizes` are height and width of the videos of each camera; `prompt_from` says what the instructions are.
    """

    def __init__(
        self,
        layout: LeRobotLayout,
        videos: Mapping[str, Video],
        tolerance_s: float,
        sizes: Mapping[str, tuple[int, int]],
        prompt_from: language_rows.PromptFrom = "task",
    ):
        self.layout, self.videos, self.tolerance_s, self.sizes = layout, videos, tolerance_s, sizes
        self.prompt_from: language_rows.PromptFrom = prompt_from

    def read(self, file: str, pictures: Path) -> list[Scanned]:
        """All episodes of a file, damaged ones with their problem; its pictures are copied to `pictures`.

        Raises OSError if the system fails, which is no problem of an episode.
        """
        episodes = self.layout.data[file]
        try:
            rows = self._rows(file, pictures)
        except (OSError, KeyError, ValueError) as error:  # what pyarrow raises for truncated and damaged files
            raise_if_system(error, self.layout.root / file)
            return [Scanned(episode, problem=f"the file cannot be read: {error}") for episode in episodes]
        result = []
        for episode in episodes:
            try:
                result.append(self._episode(episode, rows))
            except ValueError as error:
                result.append(Scanned(episode, problem=str(error)))
        return result

    def _rows(self, file: str, pictures: Path) -> _Rows:
        """The columns of a file by feature name, as far as it has them; for a picture, its span and digest."""
        with require("pyarrow.parquet").ParquetFile(self.layout.root / file) as parquet:
            there = set(parquet.schema_arrow.names)
            if lacking := _NUMBERING.keys() - there:
                raise ValueError(f"it lacks {', '.join(sorted(lacking))}, which every LeRobot dataset has")
            details = {name: (dtype, ()) for name, dtype in _NUMBERING.items()}
            details |= {name: detail for name, detail in self.layout.columns.items() if name in there}
            wanted = self.prompt_from != "task"
            language = [name for name in self.layout.language if name in there and wanted]
            if wanted and "index" in there:
                details["index"] = ("int64", ())
            table = parquet.read(columns=[*details, *language])
            columns, counts = {}, {}
            for name, detail in details.items():
                try:
                    columns[name], counts[name] = numbers(table[name], *detail)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from error
            cameras = [name for name, one in self.layout.cameras.items() if not one.is_video and name in there]
            copied, sizes = copy_pictures(parquet, cameras, pictures) if cameras else ({}, {})
            rows = table[language_rows.PERSISTENT] if language_rows.PERSISTENT in language else None
        return _Rows(columns, counts, copied, sizes, rows)

    def _episode(self, episode: Episode, rows: _Rows) -> Scanned:
        """Scan one episode. Raises ValueError if file, metadata and videos do not agree."""
        mine = np.flatnonzero((rows.columns["episode_index"] == episode.number) & (rows.counts["episode_index"] == 1))
        if len(mine) != episode.length:
            raise ValueError(f"the file has {len(mine)} of its steps; the metadata say {episode.length}")
        for name, counts in rows.counts.items():
            size = int(np.prod(rows.columns[name].shape[1:]))
            if (wrong := np.flatnonzero(counts[mine] != size)).size:
                what = amount(int(counts[mine][wrong[0]]))
                more = f", and {len(wrong) - 1} more steps like it" if len(wrong) > 1 else ""
                raise ValueError(f"{name} of step {wrong[0]} is {what}, not {size}{more}")
        if not len(mine) or not np.array_equal(rows.columns["frame_index"][mine], np.arange(len(mine))):
            raise ValueError("its steps are not numbered 0, 1, 2, ...")
        tasks, times = rows.columns["task_index"][mine], rows.columns["timestamp"][mine]
        unknown = set(tasks.tolist()) - set(self.layout.tasks)
        if unknown:
            raise ValueError(f"its task {min(unknown)} is not among the dataset's tasks")
        digest, spans, columns = hashlib.sha256(), {}, {}
        for name, camera in self.layout.cameras.items():
            if camera.is_video:
                spans[name] = self._frames(name, episode.clips[name], times, digest)
            elif name in rows.pictures:
                spans[name], digests = (values[mine] for values in rows.pictures[name])
                digest.update(digests.tobytes())
        for name in (name for name in self.layout.columns if name in rows.columns):
            columns[name] = rows.columns[name][mine]
            if not name.startswith(_RELABELLED):
                digest.update(f"{name} {columns[name].dtype} {columns[name].shape}".encode())
                digest.update(columns[name].tobytes())
        texts, styles = self._texts(rows, mine, times)
        return Scanned(
            episode,
            digest=digest.hexdigest()[:32],
            columns=columns,
            spans=spans,
            sizes=rows.sizes,
            tasks=tasks,
            texts=texts,
            styles=styles,
            period_s=float(np.median(np.diff(times))) if len(times) > 1 else math.nan,
        )

    def _texts(self, rows: _Rows, mine: np.ndarray, times: np.ndarray) -> tuple[Sequence[str | None], set[str]]:
        """The texts that stand in for the tasks', and the styles that the language rows have."""
        if rows.language is None:
            return ([None] * len(mine) if self.prompt_from != "task" else ()), set()
        lists = language_rows.read_lists(rows.language.take(mine))
        steps = rows.columns.get("index", np.arange(len(rows.language)))[mine]
        return language_rows.prompts_of(self.prompt_from, lists, times, steps), language_rows.styles(lists)

    def _frames(self, camera: str, clip: Clip, times: np.ndarray, digest: Any) -> np.ndarray:
        """The packets of a clip's frames at these times (s), int64 [steps, 2]; adds their bytes to the digest."""
        video = self.videos[clip.file]
        if video.problem:
            raise ValueError(f"{clip.file}: {video.problem}")
        if video.size != self.sizes[camera]:
            (height, width), (usual_height, usual_width) = video.size, self.sizes[camera]
            raise ValueError(
                f"{clip.file} is {height}x{width}; the camera's other videos are {usual_height}x{usual_width}"
            )
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
        # Plain reads: where a file server fails, a read raises, but touching a mapped page kills the process.
        with path.open("rb") as file:
            for offset, size, _ in video.packets[frames[:, 1]].tolist():
                file.seek(offset)
                digest.update(size.to_bytes(8, "little"))
                with naming(path):
                    digest.update(file.read(size))
        return frames


def copy_pictures(
    parquet: Any, names: Sequence[str], out: Path
) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], dict[str, tuple[int, int]]]:
    """Copy all pictures to a file in which each can be read alone.

    Returns spans and digests by feature and row, and height and width of each feature's first picture.

    A picture is bytes, or a structure with an entry `bytes`. Raises ValueError if one is missing or the first is none,
    OSError naming `out` if it cannot be written.

    Parquet compresses whole pages, so reading one picture from it would decompress many.
    """
    found: dict[str, list[tuple[int, int, bytes]]] = {name: [] for name in names}
    sizes: dict[str, tuple[int, int]] = {}
    file = out.open("wb")
    try:
        for batch in parquet.iter_batches(batch_size=_PICTURES_AT_ONCE, columns=list(names)):
            for name in names:
                column = batch.column(batch.schema.names.index(name))
                for picture in column.field("bytes") if hasattr(column, "field") else column:
                    if not picture.is_valid:
                        raise ValueError(f"{name} is stored in separate files, not in the parquet file")
                    data = picture.as_py()
                    if name not in sizes:
                        sizes[name] = image.image_size(data)
                    found[name].append((file.tell(), len(data), hashlib.sha256(data).digest()))
                    with naming(out):
                        file.write(data)
    finally:
        with naming(out):
            file.close()
    spans = {
        name: (np.array([row[:2] for row in rows], np.int64).reshape(-1, 2), np.array([row[2] for row in rows]))
        for name, rows in found.items()
    }
    return spans, sizes
