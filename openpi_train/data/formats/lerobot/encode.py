"""Video encoding equal to lerobot's: encodes an episode, and joins several episodes' videos into one file.

Read next: `lerobot_writer.py`; `lerobot_video.py` decodes them. Every second frame is a key frame, as in lerobot, so
reading any frame decodes at most two. The encoder runs in its own threads; joining copies packets.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np

from openpi_train.data.formats.lerobot.lerobot_metadata import require

Codec = Literal["av1", "h264"]
# FFmpeg's encoder and its options, as in lerobot 0.4.4 (`datasets/video_utils.py`).
_ENCODERS = {
    "av1": ("libsvtav1", {"g": "2", "crf": "30", "preset": "12"}),
    "h264": ("libx264", {"g": "2", "crf": "30"}),
}


def encode(path: Path, frames: Iterable[np.ndarray], size: tuple[int, int], *, fps: int, codec: Codec) -> int:
    """Write frames, uint8 [height, width, 3], as one video at `path` and sync it to disk; returns their number.

    Raises ValueError for a size that the codec does not support.
    """
    av = require("av")
    encoder, options = _ENCODERS[codec]
    height, width = size
    if height % 2 or width % 2:
        raise ValueError(
            f"pictures of {height}x{width} cannot be a video: both sides must be even; keep them as images"
        )
    number = 0
    with path.open("wb") as file, av.open(file, "w", format="mp4") as container:
        stream = container.add_stream(encoder, fps, options=options)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        try:
            open_encoders(container)
            for frame in frames:
                number += 1
                container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), "rgb24")))
            container.mux(stream.encode())
        except av.FFmpegError as error:
            raise ValueError(f"{encoder} does not encode pictures of {height}x{width}: {error}") from error
    _sync(path)
    return number


def open_encoders(container: Any) -> None:
    """Open the encoders of the container's streams, keeping the scheduling policy of all threads.

    As root, which is usual in containers, SVT-AV1 makes this thread and its own threads real-time (SCHED_FIFO, 99):
    they starve everything else on the cores that they use, and every process started later inherits the policy.
    """
    # It also prints twenty lines of settings for every video unless its log level is "errors only".
    os.environ.setdefault("SVT_LOG", "1")
    if sys.platform != "linux":
        container.start_encoding()
        return
    this, others = threading.get_native_id(), _threads()
    policy, priority = os.sched_getscheduler(this), os.sched_getparam(this)
    try:
        container.start_encoding()
    finally:
        for thread in {this} | _threads() - others:
            with contextlib.suppress(ProcessLookupError):  # the thread has ended
                os.sched_setscheduler(thread, policy, priority)


def _threads() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}


def join(paths: Sequence[Path], lengths: Sequence[int], out: Path, *, fps: int) -> None:
    """Join videos with `lengths` frames each into one at `out`; an episode begins where the previous one ends.

    Raises ValueError if they were encoded with different settings.
    """
    av = require("av")
    out.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(out), "w", options={"movflags": "faststart"}) as target:
        stream: Any = None
        header: Any = None
        frames_before = 0
        for path, length in zip(paths, lengths, strict=True):
            with av.open(str(path)) as source:
                part = source.streams.video[0]
                if stream is None:
                    stream = target.add_stream_from_template(part, opaque=True)
                    stream.time_base = part.time_base
                    header = part.codec_context.extradata
                if part.codec_context.extradata != header:
                    raise ValueError(f"{path} and {paths[0]} were encoded differently: they cannot be joined")
                shift = Fraction(frames_before, fps) / part.time_base
                if shift.denominator != 1:
                    raise ValueError(f"{path} counts time in {part.time_base} s, which {fps} Hz does not divide")
                for packet in source.demux(part):
                    if packet.dts is not None:
                        packet.pts, packet.dts = packet.pts + int(shift), packet.dts + int(shift)
                        packet.stream = stream
                        target.mux(packet)
            frames_before += length
    _sync(out)


def describe(path: Path) -> dict[str, Any]:
    """The entry of a camera's videos in `info.json`."""
    with require("av").open(str(path)) as container:
        stream = container.streams.video[0]
        return {
            "video.height": stream.height,
            "video.width": stream.width,
            "video.codec": stream.codec.canonical_name,
            "video.pix_fmt": stream.pix_fmt,
            "video.is_depth_map": False,
            "video.fps": int(stream.base_rate),
            "video.channels": 3,
            "has_audio": False,
        }


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
