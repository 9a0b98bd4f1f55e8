"""Writer of LeRobot datasets, format 3.0 or 2.1, episode by episode, for recording and conversion.

    writer = LeRobotWriter("datasets/my_arm", fps=10, features={...})
    writer.add_episode(columns, frames, task="open the drawer")
    writer.finish()

Until `finish` everything is in `<name>.unfinished`: each episode is a folder there, renamed into place when complete,
and a new writer with the same settings continues after the last one, also in another process. A kill loses only the
episode being written; an incomplete dataset never has the final name. Neither lerobot nor torch is needed. Read next:
`assemble.py` (makes the files from the episodes), `features.py`, `encode.py`, `episode_stats.py`.
"""

import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from openpi_train.data.core import files, image, tables
from openpi_train.data.formats.lerobot import episode_stats
from openpi_train.data.formats.lerobot.assemble import EPISODE_FILE, assemble
from openpi_train.data.formats.lerobot.encode import Codec, encode
from openpi_train.data.formats.lerobot.features import NUMBERING, Version, cameras, complete, numbers, schema, table
from openpi_train.data.formats.lerobot.lerobot_metadata import require
from openpi_train.json_object import JsonObject

logger = logging.getLogger(__name__)


class LeRobotWriter:
    """Adds episodes to a new dataset.

    Args:
        path: The dataset's folder, which must not exist.
        fps: Control steps per second, a whole number as the format requires.
        features: As in `LeRobotDataset.create`: by name, `dtype`, `shape` per step and `names` of the dims; for
            cameras `dtype` "video" or "image" and `shape` (height, width, 3).
        robot_type: The robot's name, or None.
        version: The format's version.
        codec: Codec of the videos.
        identity: What else the episodes depend on, as JSON; a writer with another identity does not continue.

    Raises:
        FileExistsError: `path` exists.
        ValueError: Invalid features, a missing extra, or an unfinished dataset with other settings.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        fps: float,
        features: Mapping[str, JsonObject],
        robot_type: str | None = None,
        version: Version = "v3.0",
        codec: Codec = "av1",
        identity: JsonObject | None = None,
    ):
        if fps != int(fps) or fps < 1:
            raise ValueError(f"fps {fps} is not a whole number of 1 or more, as LeRobot's format requires")
        if version not in get_args(Version):
            raise ValueError(f"version {version!r} is not written; it may be {' or '.join(get_args(Version))}")
        self.path, self.fps, self.features = Path(path).expanduser(), int(fps), complete(features)
        self.version: Version = version
        self.codec: Codec = codec
        self._schema = schema(self.features, version)
        if cameras(self.features, "video"):
            require("av")
        if self.path.exists():
            raise FileExistsError(f"{self.path} exists already; choose another folder, or move it aside first")
        self._work = self.path.with_name(f"{self.path.name}.unfinished")
        self._plan = {
            "fps": self.fps,
            "features": self.features,
            "robot_type": robot_type,
            "version": version,
            "codec": codec,
            "identity": dict(identity or {}),
        }
        files.claim(self._work, self._plan)
        (self._work / "episodes").mkdir(exist_ok=True)
        self.episodes: list[dict[str, Any]] = [
            files.read_json(folder / EPISODE_FILE) for folder in sorted((self._work / "episodes").glob("[0-9]*"))
        ]
        if self.episodes:
            logger.info("%s: continuing after %d existing episodes", self._work, len(self.episodes))

    @property
    def num_episodes(self) -> int:
        """Number of written episodes, including those of earlier writers."""
        return len(self.episodes)

    @property
    def tasks(self) -> list[str]:
        """The instructions so far, in the order of their numbers."""
        return list(dict.fromkeys(task for episode in self.episodes for task in episode["tasks"]))

    def add_episode(
        self,
        columns: Mapping[str, np.ndarray],
        frames: Mapping[str, Iterable[np.ndarray | bytes]],
        *,
        task: str | Sequence[str],
    ) -> None:
        """Write one episode; it is on disk when this returns.

        Args:
            columns: [n, ...] for every numeric feature; [n] or [n, 1] for single numbers.
            frames: n pictures for every camera, uint8 [height, width, 3]; for "image" features also JPEG or PNG bytes,
                stored unchanged. Consumed one by one.
            task: The instruction, a single one or one per step.

        Raises ValueError naming feature and step if the data do not fit, OSError if it cannot be written.
        """
        number = self.num_episodes
        columns = self._checked(columns)
        length = len(next(iter(columns.values())))
        per_step = [task] * length if isinstance(task, str) else list(task)
        self._check_names("cameras", frames, cameras(self.features))
        if len(per_step) != length:
            raise ValueError(f"episode {number} has {length} steps, but {len(per_step)} tasks")
        columns |= self._numbering(number, per_step)
        with tables.explain_cache_errors(self._work, "the dataset's folder"):
            draft = self._work / f".{number:06d}.{os.getpid()}"
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            try:
                episode = self._write(draft, columns, frames, length)
                episode["tasks"] = list(dict.fromkeys(per_step))
                files.write_json(draft / EPISODE_FILE, episode)
                draft.rename(self._work / "episodes" / f"{number:06d}")
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        self.episodes.append(episode)

    def finish(self) -> Path:
        """Assemble the dataset from its episodes; returns its folder. Raises ValueError if there are no episodes."""
        if not self.episodes:
            raise ValueError(f"{self.path} has no episodes yet: add one before finish()")
        whole = self._work / "whole"
        with tables.explain_cache_errors(self._work, "the dataset's folder"):
            shutil.rmtree(whole, ignore_errors=True)
            assemble(self._work / "episodes", whole, self.episodes, self.tasks, self._plan, self._schema)
            if self.path.exists():
                raise FileExistsError(f"{self.path} was created meanwhile; {self._work} holds this writer's episodes")
            whole.rename(self.path)
            shutil.rmtree(self._work)
        return self.path

    def _numbering(self, number: int, per_step: Sequence[str]) -> dict[str, np.ndarray]:
        length, tasks = len(per_step), list(dict.fromkeys([*self.tasks, *per_step]))
        steps = np.arange(length)
        found = {
            "timestamp": steps / self.fps,
            "frame_index": steps,
            "episode_index": np.full(length, number),
            "index": steps + sum(episode["length"] for episode in self.episodes),
            "task_index": [tasks.index(task) for task in per_step],
        }
        return {name: np.asarray(values, NUMBERING[name]) for name, values in found.items()}

    def _checked(self, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The columns with their features' dtypes and shapes."""
        self._check_names("columns", columns, [name for name in numbers(self.features) if name not in NUMBERING])
        checked: dict[str, np.ndarray] = {}
        for name, given in columns.items():
            values, feature = np.asarray(given), self.features[name]
            shape = () if feature["shape"] == [1] else tuple(feature["shape"])
            if values.shape[1:] == (1,) and not shape:
                values = values[:, 0]
            if values.shape[1:] != shape or not np.can_cast(values.dtype, feature["dtype"], "same_kind"):
                raise ValueError(
                    f"column {name!r} is {values.dtype} {list(values.shape[1:])} per step; its feature is "
                    f"{feature['dtype']} {list(shape)}"
                )
            if values.dtype.kind == "f" and not np.isfinite(values).all():
                step = int(np.argwhere(~np.isfinite(values))[0][0])
                raise ValueError(f"column {name!r} holds {values[step]} at step {step}: values must be finite")
            checked[name] = values.astype(feature["dtype"])
        lengths = {name: len(values) for name, values in checked.items()}
        if len(set(lengths.values())) != 1 or 0 in lengths.values():
            raise ValueError(f"an episode's columns need the same length, at least 1; they have {lengths}")
        return checked

    def _check_names(self, what: str, given: JsonObject, wanted: Sequence[str]) -> None:
        missing, unknown = sorted(set(wanted) - set(given)), sorted(set(given) - set(wanted))
        if missing or unknown:
            raise ValueError(f"{what} of episode {self.num_episodes}: missing {missing}, unknown {unknown}")

    def _write(
        self, folder: Path, columns: dict[str, np.ndarray], frames: Mapping[str, Iterable[object]], length: int
    ) -> dict[str, Any]:
        """Write an episode's files; returns its metadata."""
        found, pictures = {}, {}
        for name in self.features:
            if name not in frames:
                found[name] = episode_stats.of_column(columns[name])
                continue
            size = tuple(self.features[name]["shape"][:2])
            seen = episode_stats.PictureStats(length)
            if self.features[name]["dtype"] == "image":
                passing = _as_given(frames[name], name, size, seen)
                pictures[name] = [
                    given if isinstance(given, bytes) else image.encode(frame, "png") for given, frame in passing
                ]
                count = len(pictures[name])
            else:
                passing = (frame for _, frame in _as_given(frames[name], name, size, seen))
                count = encode(folder / f"{name}.mp4", passing, size, fps=self.fps, codec=self.codec)
            if count != length:
                raise ValueError(f"camera {name!r} has {count} pictures for {length} steps")
            found[name] = seen.result()
        require("pyarrow.parquet").write_table(table(columns, pictures, self._schema), folder / "data.parquet")
        return {"length": length, "stats": episode_stats.as_json(found, quantiles=True)}


def _as_given(
    frames: Iterable[object], name: str, size: tuple[int, ...], seen: episode_stats.PictureStats
) -> Iterator[tuple[Any, np.ndarray]]:
    """Each picture as given and as pixels; adds it to the statistics `seen`."""
    for number, given in enumerate(frames):
        frame = image.decode(given) if isinstance(given, bytes) else np.asarray(given)
        if frame.shape != (*size, 3) or frame.dtype != np.uint8:
            raise ValueError(
                f"picture {number} of {name!r} is {frame.dtype} {list(frame.shape)}; its feature is uint8 {[*size, 3]}"
            )
        seen.add(frame)
        yield given, frame
