"""Writes a LeRobot 3.0 dataset of synthetic pictures as lerobot does: AV1, a key frame every second frame, crf 30.

Read next: `lerobot_feed.py`, which reads it back. lerobot itself is not needed, and reads it too.
"""

import dataclasses
import json
from pathlib import Path

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from openpi_train.data.formats.lerobot.encode import open_encoders

FPS, TASK = 30, "pick up the block"
CAMERAS = ("observation.images.top", "observation.images.left_wrist", "observation.images.right_wrist")
_ENCODING = {"g": "2", "crf": "30", "preset": "12"}


@dataclasses.dataclass(frozen=True)
class Written:
    """A dataset: its folder, and the mean bytes of a frame in its videos."""

    root: Path
    frame_bytes: float


def write(root: Path, *, num_episodes: int, episode_length: int, height: int, width: int) -> Written:
    """Write a dataset with three cameras and 7 dims of state and action, with all episodes in one file of each kind."""
    num_steps = num_episodes * episode_length
    episode, step = np.divmod(np.arange(num_steps), episode_length)
    walk = np.cumsum(np.random.default_rng(0).normal(0, 0.02, (num_steps + 1, 7)), axis=0).astype(np.float32)
    joints = pa.list_(pa.float32(), 7)
    data = {
        "observation.state": pa.FixedSizeListArray.from_arrays(walk[:-1].ravel(), 7),
        "action": pa.FixedSizeListArray.from_arrays(walk[1:].ravel(), 7),
        "timestamp": pa.array((step / FPS).astype(np.float32)),
        "frame_index": step,
        "episode_index": episode,
        "index": np.arange(num_steps),
        "task_index": np.zeros(num_steps, np.int64),
    }
    assert data["action"].type == joints
    _save(pa.table(data), root / "data" / "chunk-000" / "file-000.parquet")
    _save(_tasks(), root / "meta" / "tasks.parquet")
    first = np.arange(num_episodes) * episode_length
    zeros = np.zeros(num_episodes, np.int64)
    episodes = {
        "episode_index": np.arange(num_episodes),
        "tasks": [[TASK]] * num_episodes,
        "length": zeros + episode_length,
        "data/chunk_index": zeros,
        "data/file_index": zeros,
        "dataset_from_index": first,
        "dataset_to_index": first + episode_length,
    }
    for camera in CAMERAS:
        places = {f"videos/{camera}/{part}": zeros for part in ("chunk_index", "file_index")}
        times = {"from_timestamp": first / FPS, "to_timestamp": (first + episode_length) / FPS}
        episodes |= places | {f"videos/{camera}/{name}": value for name, value in times.items()}
    _save(pa.table(episodes), root / "meta" / "episodes" / "chunk-000" / "file-000.parquet")
    (root / "meta" / "info.json").write_text(json.dumps(_info(num_episodes, num_steps, height, width), indent=1))
    videos = [root / "videos" / camera / "chunk-000" / "file-000.mp4" for camera in CAMERAS]
    for number, video in enumerate(videos):
        _write_video(video, num_steps, height, width, seed=number)
    return Written(root, sum(video.stat().st_size for video in videos) / (len(videos) * num_steps))


def _info(num_episodes: int, num_steps: int, height: int, width: int) -> dict:
    def number(dtype: str, size: int = 1) -> dict:
        return {"dtype": dtype, "shape": [size], "names": None}

    picture = {"dtype": "video", "shape": [height, width, 3], "names": ["height", "width", "channels"]}
    numbering = dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), number("int64"))
    return {
        "codebase_version": "v3.0",
        "robot_type": "made up",
        "total_episodes": num_episodes,
        "total_frames": num_steps,
        "total_tasks": 1,
        "chunks_size": 1000,
        "fps": FPS,
        "splits": {"train": f"0:{num_episodes}"},
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
        "features": {
            "observation.state": number("float32", 7),
            "action": number("float32", 7),
            **dict.fromkeys(CAMERAS, picture),
            "timestamp": number("float32"),
            **numbering,
        },
    }


def _tasks() -> pa.Table:
    """The one task as pandas writes it: the text is the index."""
    text = {"name": "task", "field_name": "task", "pandas_type": "unicode", "numpy_type": "object", "metadata": None}
    index = {"index_columns": ["task"], "column_indexes": [], "columns": [text], "pandas_version": "2.0.0"}
    table = pa.table({"task_index": np.zeros(1, np.int64), "task": [TASK]})
    return table.replace_schema_metadata({"pandas": json.dumps(index)})


def _save(table: pa.Table, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)


def _write_video(path: Path, num_frames: int, height: int, width: int, seed: int) -> None:
    """A textured scene that drifts under a sensor's noise, so that frames have about a real camera's bytes."""
    random = np.random.default_rng(seed)
    scene = sum(
        np.kron(random.normal(0, 8, (height // size + 1, width // size + 2, 3)), np.ones((size, size, 1)))[
            :height, :width
        ]
        for size in (8, 16, 64)
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libsvtav1", FPS, options=_ENCODING)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        open_encoders(container)
        for number in range(num_frames):
            noisy = 127 + np.roll(scene, 2 * number, axis=1) + random.normal(0, 2, (height, width, 1))
            picture = np.clip(noisy, 0, 255).astype(np.uint8)
            frame = av.VideoFrame.from_ndarray(picture, "rgb24")
            frame.pts = number  # in units of the encoder, which has FPS frames a second
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
