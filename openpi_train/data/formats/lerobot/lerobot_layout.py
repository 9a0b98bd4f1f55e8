"""Metadata of a LeRobot dataset: its features, episodes, tasks, and the files that hold them.

Read next: `lerobot_index.py`, which reads those files. Versions 2.0 and 2.1 store one episode per file and metadata
in JSON lines, 3.0 stores many episodes per file and metadata in parquet:

    meta/info.json  meta/episodes.jsonl  meta/tasks.jsonl
    data/chunk-000/episode_000000.parquet               videos/chunk-000/<camera>/episode_000000.mp4

    meta/info.json  meta/episodes/chunk-000/file-000.parquet  meta/tasks.parquet
    data/chunk-000/file-000.parquet                     videos/<camera>/chunk-000/file-000.mp4
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.data.core import cache_folders, files
from openpi_train.data.core.findings import Finding
from openpi_train.data.core.source import WIDEST_COLUMN
from openpi_train.data.formats.lerobot.depth import depth_reason
from openpi_train.data.formats.lerobot.lerobot_metadata import (
    Clip,
    Episode,
    episodes_of,
    metadata_files,
    read_rows,
    tasks_of,
    whole_number,
)
from openpi_train.json_object import JsonObject

INFO_FILE = "meta/info.json"
VERSIONS = ("v2.0", "v2.1", "v3.0")
# Columns that number the rows and change when a dataset is cut or joined; the index has its own numbering.
_NUMBERING = ("timestamp", "frame_index", "episode_index", "index", "task_index")


@dataclasses.dataclass(frozen=True)
class ImageFeature:
    """An image feature: whether it is a video, or else pictures in the parquet files; height and width; its `shape`."""

    is_video: bool
    size: tuple[int, int]
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class LeRobotLayout:
    """A dataset's metadata. Files are relative to `root`; features have their LeRobot names.

    Attributes:
        columns: dtype name and shape per step of each numeric feature.
        skipped: Features left out, each with the reason.
        language: The columns of language rows (`language.py`).
        tasks: The instruction texts by number.
        metadata: The files that the metadata were read from.
        findings: What is suspicious in the metadata.
    """

    root: Path
    columns: Mapping[str, tuple[str, tuple[int, ...]]]
    cameras: Mapping[str, ImageFeature]
    skipped: Mapping[str, str]
    language: Sequence[str]
    episodes: Sequence[Episode]
    tasks: Mapping[int, str]
    metadata: Sequence[str]
    findings: Sequence[Finding] = ()

    @property
    def videos(self) -> list[str]:
        """All video files, without duplicates."""
        return list(dict.fromkeys(clip.file for episode in self.episodes for clip in episode.clips.values()))

    @property
    def data(self) -> dict[str, list[Episode]]:
        """The episodes of every parquet file, without those that have a problem."""
        files: dict[str, list[Episode]] = {}
        for episode in self.episodes:
            if not episode.problem:
                files.setdefault(episode.data, []).append(episode)
        return files


def is_lerobot(path: str | Path) -> bool:
    """Whether the directory holds a LeRobot dataset, of any version."""
    return (Path(path).expanduser() / INFO_FILE).is_file()


def read_layout(root: Path) -> LeRobotLayout:
    """Read a dataset's metadata.

    Raises FileNotFoundError if there are none, ValueError for an unsupported version or inconsistent metadata. An
    episode whose row lacks its length or a file is listed with its problem.
    """
    if not is_lerobot(root):
        raise FileNotFoundError(
            f"{root} holds no LeRobot dataset (no {INFO_FILE})"
            + (cache_folders.how_to_download(root) or "; give the folder with meta/, data/ and videos/")
        )
    try:
        info = _read_info(root)
        columns, cameras, skipped, language = _sort_features(info["features"])
        names = metadata_files(root, info["codebase_version"])
        episodes, repeated = episodes_of(
            read_rows(root, names[1:]), lambda number, row: _episode(number, row, info, cameras)
        )
        tasks, repeated_tasks = tasks_of(read_rows(root, names[:1]))
    except FileNotFoundError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError) as error:
        what = f"an entry {error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(f"cannot read the metadata of {root}: {what}") from error
    return LeRobotLayout(
        root=root,
        columns=columns,
        cameras=cameras,
        skipped=skipped,
        language=language,
        episodes=episodes,
        tasks=tasks,
        metadata=[INFO_FILE, *names],
        findings=[*repeated, *repeated_tasks, *_totals(info, episodes)],
    )


def _read_info(root: Path) -> dict[str, Any]:
    """The content of `info.json`. Raises ValueError for an unsupported version."""
    try:
        info = files.read_json(root / INFO_FILE)
    except ValueError as error:
        raise ValueError(f"{INFO_FILE} is not JSON ({error})") from error
    if info["codebase_version"] not in VERSIONS:
        raise ValueError(
            f"its codebase_version is {info['codebase_version']!r}; supported are {', '.join(VERSIONS)}: "
            "convert it with the lerobot package"
        )
    videos = [name for name, feature in info["features"].items() if feature.get("dtype") == "video"]
    if videos and not isinstance(info.get("video_path"), str):
        raise ValueError(f"{INFO_FILE} has no video_path, but the videos {', '.join(videos)}")
    return info


def flat_names(names: object) -> tuple[str, ...]:
    """A feature's names as a tuple; older datasets have a mapping (`{"motors": [...]}`)."""
    if isinstance(names, dict):
        return tuple(name for part in names.values() for name in flat_names(part))
    return tuple(map(str, names)) if isinstance(names, list) else ()


def _sort_features(features: JsonObject) -> tuple[dict, dict, dict, list[str]]:
    """Columns, cameras, and skipped features with the reason, by feature name; the columns of language rows."""
    columns, cameras, skipped, language = {}, {}, {}, []
    for name, feature in features.items():
        if name in _NUMBERING:
            continue
        try:
            dtype, shape = str(feature["dtype"]), tuple(whole_number(size, "shape") for size in feature["shape"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{INFO_FILE}: the feature {name} needs a dtype, and a shape of whole numbers; it has {feature}"
            ) from error
        if dtype in ("video", "image"):
            if why := depth_reason(feature) or ("" if len(shape) == 3 else f"pictures of shape {list(shape)}"):
                skipped[name] = why
            else:
                channels_first = next(iter(feature.get("names") or [""])) in ("channels", "channel")
                height, width = shape[1:] if channels_first else shape[:2]
                cameras[name] = ImageFeature(dtype == "video", (height, width), shape)
        elif dtype == "bool" or dtype.startswith(("float", "int", "uint")):
            if math.prod(shape) > WIDEST_COLUMN:
                skipped[name] = f"{math.prod(shape)} numbers wide"
            else:
                columns[name] = (np.dtype(dtype).name, () if shape == (1,) else shape)
        elif dtype == "language":
            language.append(name)
        else:
            skipped[name] = f"of type {dtype}"
    return columns, cameras, skipped, language


def _episode(number: int, row: Mapping[str, Any], info: JsonObject, cameras: Mapping[str, ImageFeature]) -> Episode:
    """The episode in a row of the metadata. Raises ValueError if its length or one of its files is not given."""
    length = whole_number(row["length"], "length")
    videos = [name for name, camera in cameras.items() if camera.is_video]
    if info["codebase_version"] != "v3.0":
        place = {"episode_index": number, "episode_chunk": number // whole_number(info["chunks_size"], "chunks_size")}
        clips = {name: Clip(info["video_path"].format(video_key=name, **place), 0.0) for name in videos}
        return Episode(number, length, info["data_path"].format(**place), clips)
    clips = {}
    for name in videos:
        part = f"videos/{name}"
        place = {key: whole_number(row[f"{part}/{key}"], f"{part}/{key}") for key in ("chunk_index", "file_index")}
        start_s = row[f"{part}/from_timestamp"]
        if start_s is None or not math.isfinite(start_s):
            raise ValueError(f"its {part}/from_timestamp is {'null' if start_s is None else start_s}")
        clips[name] = Clip(info["video_path"].format(video_key=name, **place), start_s)
    place = {key: whole_number(row[f"data/{key}"], f"data/{key}") for key in ("chunk_index", "file_index")}
    return Episode(number, length, info["data_path"].format(**place), clips)


def _totals(info: JsonObject, episodes: Sequence[Episode]) -> list[Finding]:
    """The finding that `info.json` counts other episodes than are listed."""
    total = info.get("total_episodes")
    if total is None or total == len(episodes):
        return []
    return [
        Finding(
            kind="info.json counts other episodes",
            count=len(episodes),
            unit="listed episodes",
            what=f"total_episodes is {total}",
            training="all that are listed are used",
            remedy="Put back the metadata of these files, or remove what is left over from another version",
        )
    ]
