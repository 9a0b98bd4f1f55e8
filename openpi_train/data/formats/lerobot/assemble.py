"""Assembles the files of a LeRobot dataset from its episodes' folders.

Read next: `lerobot_layout.py`, which reads them.

    episodes/000000/data.parquet  <camera>.mp4  episode.json     the output of `lerobot_writer.py`

Format 2.1 keeps one file per episode; 3.0 joins them up to a size limit, without encoding again.
"""

import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openpi_train.data.formats.lerobot import episode_stats
from openpi_train.data.formats.lerobot.encode import describe, join
from openpi_train.data.formats.lerobot.features import cameras
from openpi_train.data.formats.lerobot.lerobot_layout import INFO_FILE
from openpi_train.data.formats.lerobot.lerobot_metadata import require
from openpi_train.json_object import JsonObject

EPISODE_FILE = "episode.json"
_CHUNK = 1000
_DATA_MB, _VIDEO_MB = 100, 200
_EPISODES_PER_FILE = 10_000
_PATHS = {
    "v2.1": (
        "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    ),
    "v3.0": (
        "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    ),
}
_TASK_COLUMN = "__index_level_0__"


def assemble(
    episodes: Path,
    out: Path,
    records: Sequence[JsonObject],
    tasks: Sequence[str],
    plan: JsonObject,
    schema: Any,
) -> None:
    """Write the dataset `out` from the folders in `episodes`; `records` has an entry for each, in order."""
    folders = [episodes / f"{number:06d}" for number in range(len(records))]
    features = {name: dict(feature) for name, feature in plan["features"].items()}
    videos = cameras(features, "video")
    for name in videos:
        features[name]["info"] = describe(folders[0] / f"{name}.mp4")
    joined = plan["version"] == "v3.0"
    whole = {"codebase_version": plan["version"], "robot_type": plan["robot_type"]}
    whole |= {
        "total_episodes": len(records),
        "total_frames": sum(record["length"] for record in records),
        "total_tasks": len(tasks),
    }
    rows = [{"episode_index": n, "tasks": one["tasks"], "length": one["length"]} for n, one in enumerate(records)]
    if joined:
        _write_joined(folders, out, records, rows, tasks, videos, plan["fps"], schema)
        whole |= {"chunks_size": _CHUNK, "data_files_size_in_mb": _DATA_MB, "video_files_size_in_mb": _VIDEO_MB}
    else:
        _write_single(folders, out, records, rows, tasks, videos)
        whole |= {"total_videos": len(videos) * len(records), "total_chunks": -(-len(records) // _CHUNK)}
        whole |= {"chunks_size": _CHUNK}
    data_path, video_path = _PATHS[plan["version"]]
    whole |= {"fps": plan["fps"], "splits": {"train": f"0:{len(records)}"}, "data_path": data_path}
    whole |= {"video_path": video_path if videos else None, "features": features}
    _write_json(out / INFO_FILE, whole)


def _write_single(
    folders: Sequence[Path],
    out: Path,
    records: Sequence[JsonObject],
    rows: Sequence[dict[str, Any]],
    tasks: Sequence[str],
    videos: Sequence[str],
) -> None:
    data_path, video_path = _PATHS["v2.1"]
    for number, folder in enumerate(folders):
        place = {"episode_index": number, "episode_chunk": number // _CHUNK}
        _copy(folder / "data.parquet", out / data_path.format(**place))
        for name in videos:
            _copy(folder / f"{name}.mp4", out / video_path.format(video_key=name, **place))
    _write_lines(out / "meta/tasks.jsonl", [{"task_index": n, "task": task} for n, task in enumerate(tasks)])
    _write_lines(out / "meta/episodes.jsonl", rows)
    described = [episode_stats.as_json(episode_stats.from_json(record["stats"]), quantiles=False) for record in records]
    stats = [{"episode_index": number, "stats": entry} for number, entry in enumerate(described)]
    _write_lines(out / "meta/episodes_stats.jsonl", stats)


def _write_joined(
    folders: Sequence[Path],
    out: Path,
    records: Sequence[JsonObject],
    rows: list[dict[str, Any]],
    tasks: Sequence[str],
    videos: Sequence[str],
    fps: int,
    schema: Any,
) -> None:
    parquet = require("pyarrow.parquet")
    data_path, video_path = _PATHS["v3.0"]
    lengths = [record["length"] for record in records]
    ends = list(itertools.accumulate(lengths))
    for place, members in _files([folder / "data.parquet" for folder in folders], _DATA_MB):
        path = out / data_path.format(**place)
        path.parent.mkdir(parents=True, exist_ok=True)
        with parquet.ParquetWriter(path, schema) as writer:
            for number in members:
                writer.write_table(parquet.read_table(folders[number] / "data.parquet", schema=schema))
                rows[number] |= {f"data/{name}": index for name, index in place.items()}
    for number, row in enumerate(rows):
        row |= {"dataset_from_index": ends[number] - lengths[number], "dataset_to_index": ends[number]}
    for name in videos:
        paths = [folder / f"{name}.mp4" for folder in folders]
        for place, members in _files(paths, _VIDEO_MB):
            path = out / video_path.format(video_key=name, **place)
            join([paths[number] for number in members], [lengths[number] for number in members], path, fps=fps)
            begin = ends[members[0]] - lengths[members[0]]
            for number in members:
                times = {"from_timestamp": ends[number] - lengths[number] - begin, "to_timestamp": ends[number] - begin}
                rows[number] |= {f"videos/{name}/{key}": index for key, index in place.items()}
                rows[number] |= {f"videos/{name}/{key}": steps / fps for key, steps in times.items()}
    for row, record in zip(rows, records, strict=True):
        row |= {f"stats/{name}/{key}": value for name, entry in record["stats"].items() for key, value in entry.items()}
    _write_episodes(out, rows)
    _write_tasks(out, tasks)
    total = episode_stats.of_all([episode_stats.from_json(record["stats"]) for record in records])
    _write_json(out / "meta/stats.json", episode_stats.as_json(total, quantiles=True))


def _files(paths: Sequence[Path], limit_mb: int) -> list[tuple[dict[str, int], list[int]]]:
    """The groups of episodes' files to join: the place of each joined file, and the numbers of its episodes."""
    groups: list[list[int]] = [[]]
    size = 0
    for number, path in enumerate(paths):
        if groups[-1] and size + path.stat().st_size >= limit_mb * 2**20:
            groups.append([])
            size = 0
        groups[-1].append(number)
        size += path.stat().st_size
    return [(_place(number), group) for number, group in enumerate(groups)]


def _place(number: int) -> dict[str, int]:
    return {"chunk_index": number // _CHUNK, "file_index": number % _CHUNK}


def _write_episodes(out: Path, rows: Sequence[dict[str, Any]]) -> None:
    pa, parquet = require("pyarrow"), require("pyarrow.parquet")
    for number, first in enumerate(range(0, len(rows), _EPISODES_PER_FILE)):
        place = _place(number)
        part = [
            row | {f"meta/episodes/{name}": index for name, index in place.items()}
            for row in rows[first:][:_EPISODES_PER_FILE]
        ]
        path = out / "meta/episodes" / "chunk-{chunk_index:03d}/file-{file_index:03d}.parquet".format(**place)
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.Table.from_pydict({name: [row[name] for row in part] for name in part[0]}), path)


def _write_tasks(out: Path, tasks: Sequence[str]) -> None:
    require("pyarrow.parquet").write_table(tasks_table(tasks), out / "meta/tasks.parquet")


def tasks_table(tasks: Sequence[str]) -> Any:
    """The tasks as pandas writes a frame with the tasks as its index, which is how lerobot looks them up."""
    pa = require("pyarrow")

    def column(
        name: str | None, field: str | None, kind: str, numpy_kind: str, metadata: object = None
    ) -> dict[str, Any]:
        described = {"name": name, "field_name": field, "pandas_type": kind, "numpy_type": numpy_kind}
        return described | {"metadata": metadata}

    text = {
        "index_columns": [_TASK_COLUMN],
        "column_indexes": [column(None, None, "unicode", "str", {"encoding": "UTF-8"})],
        "columns": [
            column("task_index", "task_index", "int64", "int64"),
            column(None, _TASK_COLUMN, "object", "str"),
        ],
        "attributes": {},
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "3.0.0",
    }
    fields = [("task_index", pa.int64()), (_TASK_COLUMN, pa.large_string())]
    schema = pa.schema(fields, metadata={"pandas": json.dumps(text)})
    arrays = [pa.array(range(len(tasks)), pa.int64()), pa.array(tasks, pa.large_string())]
    return pa.Table.from_arrays(arrays, schema=schema)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _write_lines(path: Path, rows: Sequence[JsonObject]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=4, ensure_ascii=False, allow_nan=False), encoding="utf-8")
