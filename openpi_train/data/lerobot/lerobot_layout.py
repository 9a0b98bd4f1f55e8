"""Metadata of a LeRobot dataset: its features, episodes, tasks, and the files that hold them.

Read next: `lerobot_index.py`, which reads those files. Versions 2.0 and 2.1 store one episode per file and metadata
in JSON lines, 3.0 stores many episodes per file and metadata in parquet:

    meta/info.json  meta/episodes.jsonl  meta/tasks.jsonl
    data/chunk-000/episode_000000.parquet               videos/chunk-000/<camera>/episode_000000.mp4

    meta/info.json  meta/episodes/chunk-000/file-000.parquet  meta/tasks.parquet
    data/chunk-000/file-000.parquet                     videos/<camera>/chunk-000/file-000.mp4
"""

import dataclasses
import importlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.data.lerobot.depth import depth_reason
from openpi_train.data.source import WIDEST_COLUMN

INFO_FILE = "meta/info.json"
VERSIONS = ("v2.0", "v2.1", "v3.0")
# Columns that number the rows and change when a dataset is cut or joined; the index has its own numbering.
_NUMBERING = ("timestamp", "frame_index", "episode_index", "index", "task_index")


@dataclasses.dataclass(frozen=True)
class ImageFeature:
    """An image feature: whether it is a video, or else pictures in the parquet files; height and width."""

    is_video: bool
    size: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Clip:
    """An episode's part of a video file: the file, and the episode's start time in it."""

    file: str
    start_s: float


@dataclasses.dataclass(frozen=True)
class Episode:
    """One episode: its number and length, its parquet file, and its clip of every video camera."""

    number: int
    length: int
    data: str
    clips: Mapping[str, Clip]


@dataclasses.dataclass(frozen=True)
class LeRobotLayout:
    """A dataset's metadata. Files are relative to `root`; features have their LeRobot names.

    Attributes:
        columns: dtype name and shape per step of each numeric feature.
        skipped: Features left out, each with the reason.
        tasks: The instruction texts by number.
        metadata: The files that the metadata were read from.
    """

    root: Path
    columns: Mapping[str, tuple[str, tuple[int, ...]]]
    cameras: Mapping[str, ImageFeature]
    skipped: Mapping[str, str]
    episodes: Sequence[Episode]
    tasks: Mapping[int, str]
    metadata: Sequence[str]

    @property
    def videos(self) -> list[str]:
        """All video files, without duplicates."""
        return list(dict.fromkeys(clip.file for episode in self.episodes for clip in episode.clips.values()))

    @property
    def data(self) -> dict[str, list[Episode]]:
        """The episodes of every parquet file."""
        files: dict[str, list[Episode]] = {}
        for episode in self.episodes:
            files.setdefault(episode.data, []).append(episode)
        return files


def require(module: str) -> Any:
    """Import `pyarrow.parquet` or `av`. Raises ValueError naming the extra to install if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"such datasets need {module}: pip install 'openpi_train[lerobot]' ({error})") from error


def is_lerobot(path: str | Path) -> bool:
    """Whether the directory holds a LeRobot dataset, of any version."""
    return (Path(path).expanduser() / INFO_FILE).is_file()


def read_layout(root: Path) -> LeRobotLayout:
    """Read a dataset's metadata.

    Raises FileNotFoundError if there are none, ValueError for an unsupported version or inconsistent metadata.
    """
    if not is_lerobot(root):
        raise FileNotFoundError(
            f"{root} holds no LeRobot dataset (no {INFO_FILE}); give the folder with meta/, data/ and videos/"
        )
    try:
        info = json.loads((root / INFO_FILE).read_text(encoding="utf-8"))
        if info["codebase_version"] not in VERSIONS:
            raise ValueError(
                f"its codebase_version is {info['codebase_version']!r}; supported are {', '.join(VERSIONS)}: "
                "convert it with the lerobot package"
            )
        columns, cameras, skipped = _sort_features(info["features"])
        files = _metadata_files(root, info["codebase_version"])
        return LeRobotLayout(
            root=root,
            columns=columns,
            cameras=cameras,
            skipped=skipped,
            episodes=[
                _episode(row, info, cameras) for row in sorted(_rows(root, files[1:]), key=lambda r: r["episode_index"])
            ],
            tasks={row["task_index"]: _text(row) for row in _rows(root, files[:1])},
            metadata=[INFO_FILE, *files],
        )
    except (KeyError, TypeError, ValueError) as error:
        what = f"an entry {error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(f"cannot read the metadata of {root}: {what}") from error


def flat_names(names: Any) -> tuple[str, ...]:
    """A feature's names as a tuple; older datasets have a mapping (`{"motors": [...]}`)."""
    if isinstance(names, dict):
        return tuple(name for part in names.values() for name in flat_names(part))
    return tuple(map(str, names)) if isinstance(names, list) else ()


def _sort_features(features: Mapping[str, Any]) -> tuple[dict, dict, dict]:
    """Columns, cameras, and skipped features with the reason, by feature name."""
    columns, cameras, skipped = {}, {}, {}
    for name, feature in features.items():
        dtype, shape = feature["dtype"], tuple(feature["shape"])
        if name in _NUMBERING:
            continue
        if dtype in ("video", "image"):
            if why := depth_reason(feature) or ("" if len(shape) == 3 else f"pictures of shape {list(shape)}"):
                skipped[name] = why
            else:
                channels_first = next(iter(feature.get("names") or [""])) in ("channels", "channel")
                cameras[name] = ImageFeature(dtype == "video", shape[1:] if channels_first else shape[:2])
        elif dtype == "bool" or dtype.startswith(("float", "int", "uint")):
            if math.prod(shape) > WIDEST_COLUMN:
                skipped[name] = f"{math.prod(shape)} numbers wide"
            else:
                columns[name] = (np.dtype(dtype).name, () if shape == (1,) else shape)
        else:
            skipped[name] = f"of type {dtype}"
    return columns, cameras, skipped


def _metadata_files(root: Path, version: str) -> list[str]:
    """The file of the tasks, then the files of the episodes."""
    if version != "v3.0":
        return ["meta/tasks.jsonl", "meta/episodes.jsonl"]
    episodes = sorted(str(path.relative_to(root)) for path in root.glob("meta/episodes/*/*.parquet"))
    if not episodes:
        raise ValueError("meta/episodes holds no parquet file")
    return ["meta/tasks.parquet", *episodes]


def _rows(root: Path, files: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of JSON lines or parquet files, without the episodes' statistics."""
    rows = []
    for file in files:
        if file.endswith(".jsonl"):
            lines = (root / file).read_text(encoding="utf-8").splitlines()
            rows += [json.loads(line) for line in lines if line.strip()]
        else:
            parquet = require("pyarrow.parquet").ParquetFile(root / file)
            names = [name for name in parquet.schema_arrow.names if not name.startswith("stats/")]
            rows += parquet.read(columns=names).to_pylist()
    return rows


def _text(row: Mapping[str, Any]) -> str:
    """The instruction in a row of the tasks; in parquet it is pandas' index, under any name."""
    texts = [value for value in row.values() if isinstance(value, str)]
    if len(texts) != 1:
        raise ValueError(f"task {row['task_index']} has {len(texts)} texts, not one")
    return texts[0].strip()


def _episode(row: Mapping[str, Any], info: Mapping[str, Any], cameras: Mapping[str, ImageFeature]) -> Episode:
    number = row["episode_index"]
    videos = [name for name, camera in cameras.items() if camera.is_video]
    if info["codebase_version"] != "v3.0":
        place = {"episode_index": number, "episode_chunk": number // info["chunks_size"]}
        clips = {name: Clip(info["video_path"].format(video_key=name, **place), 0.0) for name in videos}
        return Episode(number, row["length"], info["data_path"].format(**place), clips)
    clips = {}
    for name in videos:
        place = {part: row[f"videos/{name}/{part}"] for part in ("chunk_index", "file_index")}
        file = info["video_path"].format(video_key=name, **place)
        clips[name] = Clip(file, row[f"videos/{name}/from_timestamp"])
    place = {part: row[f"data/{part}"] for part in ("chunk_index", "file_index")}
    return Episode(number, row["length"], info["data_path"].format(**place), clips)
