"""`LeRobotParts`: a LeRobot dataset, format 3.0, that grows by numbered parts, each written by several processes.

    parts.begin(12)                      one process: removes part 12 and later ones, left by a run that was killed
    parts.draft(12, name, ...)           any process: an episode whose number is not known yet
    parts.place(12, name, ...)           the same process: now it is known
    parts.publish(12, names)             one process, after all others have placed theirs

A part is in the dataset as a whole or not at all: one file has the metadata of all its episodes, and is written last.
Each episode has a data file of its own, pictures included. Read next: `features.py`; `assemble.py` for finished ones.
"""

import io
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.data.core import files, image, tables
from openpi_train.data.formats.lerobot import episode_stats
from openpi_train.data.formats.lerobot.assemble import tasks_table
from openpi_train.data.formats.lerobot.features import NUMBERING, cameras, complete, schema, table
from openpi_train.data.formats.lerobot.lerobot_layout import INFO_FILE
from openpi_train.data.formats.lerobot.lerobot_metadata import require
from openpi_train.json_object import JsonObject

logger = logging.getLogger(__name__)

# Six digits: readers sort files by name, and a run has more than a thousand parts.
_DATA_PATH = "data/chunk-{chunk_index:06d}/file-{file_index:06d}.parquet"
_EPISODES_PATH = "meta/episodes/chunk-{chunk_index:06d}/file-000000.parquet"


class LeRobotParts:
    """Writes parts of a dataset. Every process makes one with the same arguments.

    Args:
        path: The dataset's folder.
        fps: Control steps per second, a whole number as the format requires.
        features: As `LeRobotWriter`'s; cameras are "image".
        tasks: All instructions that episodes can have.
        robot_type: The robot's name, or None.
        identity: What else the episodes depend on, as JSON; parts of another identity are not added.

    Raises ValueError for invalid features or a missing extra.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        fps: int,
        features: Mapping[str, JsonObject],
        tasks: Sequence[str],
        robot_type: str | None = None,
        identity: JsonObject | None = None,
    ):
        self.path, self.fps, self.features = Path(path).expanduser(), fps, complete(features)
        assert not cameras(self.features, "video"), "pictures are in the data files"
        self.tasks = list(dict.fromkeys(tasks))
        self._robot_type, self._schema = robot_type, schema(self.features, "v3.0")
        self._plan = {"fps": fps, "features": self.features, "tasks": self.tasks, "identity": dict(identity or {})}
        # By number: episodes, steps and statistics of each published part.
        self._parts: dict[int, dict[str, Any]] = {}

    def claim(self) -> None:
        """Create the folder, or check that this dataset was begun in it. For one process.

        Raises ValueError if something else is in the folder.
        """
        with tables.explain_cache_errors(self.path, "the dataset's folder"):
            if self.path.is_dir() and any(self.path.iterdir()) and not (self.path / files.PLAN).is_file():
                raise ValueError(f"{self.path} holds something else: give another folder")
            files.claim(self.path, self._plan)

    def begin(self, part: int) -> tuple[int, int]:
        """Remove this part and later ones; returns the episodes and the steps of the parts before. For one process.

        Part 0 begins a new dataset: an older one in this folder is set aside.
        """
        if part == 0 and any((self.path / "meta" / "parts").glob("*")):
            logger.warning("the episodes of an earlier run are now in %s", files.set_aside(self.path, "aside"))
        self.claim()
        shutil.rmtree(self.path / ".drafts", ignore_errors=True)
        # First what makes an episode part of the dataset.
        for pattern in ("meta/episodes/chunk-*", "meta/parts/*.json", "data/chunk-*"):
            for number, path in self._numbered(pattern).items():
                if number >= part and path.is_dir():
                    shutil.rmtree(path)
                elif number >= part:
                    path.unlink()
        kept = self._numbered("meta/parts/*.json")
        self._parts = {number: files.read_json(path) for number, path in sorted(kept.items())}
        if self._total("episodes"):
            self._write_totals()
        return self._total("episodes"), self._total("steps")

    def draft(
        self,
        part: int,
        name: str,
        columns: Mapping[str, np.ndarray],
        pictures: Mapping[str, Sequence[bytes]],
        *,
        task: str,
    ) -> None:
        """Write an episode that is not in the dataset yet.

        Args:
            name: Any file name; no other episode of the part has it.
            columns: [n, ...] for every numeric feature, in its dtype.
            pictures: n PNG or JPEG files for every camera.
            task: Its instruction.
        """
        length = len(next(iter(columns.values())))
        steps = np.arange(length)
        numbers = {"timestamp": steps / self.fps, "frame_index": steps, "episode_index": steps * 0, "index": steps}
        numbers["task_index"] = np.full(length, self.tasks.index(task))
        everything = {**columns, **{column: values.astype(NUMBERING[column]) for column, values in numbers.items()}}
        stats = {column: episode_stats.of_column(values) for column, values in everything.items()}
        for camera, encoded in pictures.items():
            seen = episode_stats.PictureStats(length)
            for one in encoded:
                seen.add(image.decode(one))
            stats[camera] = seen.result()
        rows = table(everything, {camera: list(encoded) for camera, encoded in pictures.items()}, self._schema)
        files.write_bytes(self._draft(part, f"{name}.parquet"), self._parquet(rows))
        told = {"length": length, "task": task, "stats": episode_stats.as_json(stats, quantiles=True)}
        files.write_json(self._draft(part, f"{name}.json"), told)

    def place(self, part: int, name: str, *, number: int, episode: int, first_step: int) -> None:
        """Give a draft its number in the part, its number in the dataset, and the number of its first step there."""
        parquet, pa = require("pyarrow.parquet"), require("pyarrow")
        rows = parquet.read_table(self._draft(part, f"{name}.parquet"), schema=self._schema)
        steps = np.arange(len(rows))
        found = {"episode_index": steps * 0 + episode, "index": steps + first_step}
        arrays = [pa.array(found[one]) if one in found else rows.column(one) for one in self._schema.names]
        path = self.path / _DATA_PATH.format(chunk_index=part, file_index=number)
        files.write_bytes(path, self._parquet(pa.Table.from_arrays(arrays, schema=self._schema)))

    def publish(self, part: int, names: Sequence[str]) -> None:
        """Add the part, whose placed episodes are these drafts in order, to the dataset. For one process."""
        told = [files.read_json(self._draft(part, f"{name}.json")) for name in names]
        stats = episode_stats.of_all([episode_stats.from_json(one["stats"]) for one in told]) if told else {}
        lengths = [one["length"] for one in told]
        first_episode, ends = self._total("episodes"), self._total("steps") + np.cumsum(lengths)
        record = {
            "episodes": len(told),
            "steps": sum(lengths),
            "stats": episode_stats.as_json(stats, quantiles=True),
        }
        files.write_json(self.path / "meta" / "parts" / f"{part:06d}.json", record)
        self._parts[part] = record
        if told:
            files.write_bytes(self.path / "meta/tasks.parquet", self._parquet(tasks_table(self.tasks)))
            self._write_totals()
            places = {"chunk_index": [part] * len(told), "file_index": range(len(told))}
            rows = {
                "episode_index": range(first_episode, first_episode + len(told)),
                "tasks": [[one["task"]] for one in told],
                "length": lengths,
                **{f"data/{name}": values for name, values in places.items()},
                "dataset_from_index": ends - lengths,
                "dataset_to_index": ends,
                "meta/episodes/chunk_index": [part] * len(told),
                "meta/episodes/file_index": [0] * len(told),
            }
            path = self.path / _EPISODES_PATH.format(chunk_index=part)
            files.write_bytes(path, self._parquet(require("pyarrow").Table.from_pydict(rows)))
        shutil.rmtree(self._draft(part, ""), ignore_errors=True)

    def _write_totals(self) -> None:
        """Write the files that describe the dataset as a whole."""
        found = [part["stats"] for part in self._parts.values() if part["episodes"]]
        total = episode_stats.of_all([episode_stats.from_json(one) for one in found])
        files.write_json(self.path / "meta/stats.json", episode_stats.as_json(total, quantiles=True))
        info = {
            "codebase_version": "v3.0",
            "robot_type": self._robot_type,
            "total_episodes": self._total("episodes"),
            "total_frames": self._total("steps"),
            "total_tasks": len(self.tasks),
            "chunks_size": 1000,
            "data_files_size_in_mb": 100,
            "video_files_size_in_mb": 200,
            "fps": self.fps,
            "splits": {"train": f"0:{self._total('episodes')}"},
            "data_path": _DATA_PATH,
            "video_path": None,
            "features": self.features,
        }
        files.write_json(self.path / INFO_FILE, info)

    def _total(self, what: str) -> int:
        return sum(part[what] for part in self._parts.values())

    def _numbered(self, pattern: str) -> dict[int, Path]:
        """The files or folders of parts, by the part's number."""
        return {int(path.stem.removeprefix("chunk-")): path for path in self.path.glob(pattern)}

    def _draft(self, part: int, name: str) -> Path:
        return self.path / ".drafts" / f"{part:06d}" / name

    def _parquet(self, rows: object) -> bytes:
        file = io.BytesIO()
        require("pyarrow.parquet").write_table(rows, file)
        return file.getvalue()
