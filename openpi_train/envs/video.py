"""Videos of episodes: frames are recorded during a rollout, and written as MP4, or as GIF without PyAV."""

import importlib.util
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int, UInt8
from PIL import Image

from openpi_train.envs.env import Env, EnvStates

logger = logging.getLogger(__name__)

_LEAST_PIXELS = 192  # smaller pictures are enlarged by repeating pixels
_FRAMES_AFTER_SUCCESS = 5


class VideoRecorder:
    """Makes videos of the first `num_videos` episodes of an evaluation in `folder`; each process films its own."""

    def __init__(self, env: Env, num_videos: int, folder: Path):
        self._env, self._num_videos, self._folder = env, num_videos, folder
        self._frames: dict[int, list[np.ndarray]] = {}
        self._names: dict[int, str] = {}
        self._succeeded: dict[int, bool] = {}

    def watch(
        self, numbers: Int[np.ndarray, " b"], tasks: Int[np.ndarray, " b"]
    ) -> Callable[[Any, Bool[np.ndarray, " b"]], None] | None:
        """The `watch` callback of `rollout` for episodes with these numbers and tasks; None if none needs a video."""
        rows = np.flatnonzero(numbers < self._num_videos)
        if not len(rows):
            return None
        left = dict.fromkeys(rows.tolist(), _FRAMES_AFTER_SUCCESS)
        for row in rows.tolist():
            self._names[int(numbers[row])] = self._env.tasks[int(tasks[row])]

        def note(states: EnvStates, done: Bool[np.ndarray, " b"]) -> None:
            wanted = np.asarray([row for row, frames in left.items() if frames], np.int64)
            pictures = self._env.pictures(states, wanted) if len(wanted) else {}
            for place, row in enumerate(wanted.tolist()):
                number = int(numbers[row])
                self._succeeded[number] = bool(done[row])
                left[row] -= int(done[row])
                if pictures:
                    frame = side_by_side([pictures[name][place] for name in sorted(pictures)])
                    self._frames.setdefault(number, []).append(frame)

        return note

    def write(self) -> list[Path]:
        """Write the videos, named after number, task and outcome. Returns their paths, by number."""
        paths = []
        for number, frames in sorted(self._frames.items()):
            outcome = "success" if self._succeeded[number] else "failure"
            stem = self._folder / f"{number:03d}_{self._names[number]}_{outcome}"
            paths.append(write_video(stem, frames, self._env.control_hz))
        if self._names and not paths:
            logger.info("no videos: %s renders no pictures", type(self._env).__name__)
        return paths


def picture_of(image: np.ndarray) -> UInt8[np.ndarray, "height width 3"]:
    """A row's picture as uint8, of uint8 or of float in [-1, 1]; of several control steps the current one."""
    image = image if image.ndim == 3 else image[-1]
    return image if image.dtype == np.uint8 else np.round((image + 1) * 127.5).astype(np.uint8)


def side_by_side(pictures: Sequence[UInt8[np.ndarray, "_ _ 3"]]) -> UInt8[np.ndarray, "height width 3"]:
    """Pictures next to each other, padded with black to the highest one, and enlarged if tiny."""
    height = max(picture.shape[0] for picture in pictures)
    padded = [np.pad(picture, ((0, height - picture.shape[0]), (0, 0), (0, 0))) for picture in pictures]
    times = -(-_LEAST_PIXELS // height)
    return np.concatenate(padded, axis=1).repeat(times, axis=0).repeat(times, axis=1)


def write_video(stem: Path, frames: Sequence[UInt8[np.ndarray, "height width 3"]], frames_per_s: float) -> Path:
    """Write `<stem>.mp4` (H.264, which every browser plays), or `<stem>.gif` without PyAV, atomically."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    has_av = importlib.util.find_spec("av") is not None
    path = stem.with_name(stem.name + (".mp4" if has_av else ".gif"))
    partial = path.with_name(".partial-" + path.name)
    (_write_mp4 if has_av else _write_gif)(partial, frames, frames_per_s)
    os.replace(partial, path)
    return path


def _write_mp4(path: Path, frames: Sequence[np.ndarray], frames_per_s: float) -> None:
    import av

    height, width = (size + size % 2 for size in frames[0].shape[:2])  # yuv420p halves both
    with av.open(str(path), "w", format="mp4", options={"movflags": "faststart"}) as file:
        stream: Any = file.add_stream("libx264", rate=round(frames_per_s), options={"crf": "20", "preset": "veryfast"})
        stream.width, stream.height, stream.pix_fmt, stream.thread_count = width, height, "yuv420p", 1
        for frame in frames:
            even = np.pad(frame, ((0, height - frame.shape[0]), (0, width - frame.shape[1]), (0, 0)), mode="edge")
            file.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(even), format="rgb24")))
        file.mux(stream.encode())


def _write_gif(path: Path, frames: Sequence[np.ndarray], frames_per_s: float) -> None:
    first, *rest = [Image.fromarray(frame) for frame in frames]
    first.save(path, format="GIF", save_all=True, append_images=rest, duration=round(1000 / frames_per_s), loop=0)
