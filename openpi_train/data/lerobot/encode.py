"""Videos as lerobot writes them: an episode encoded, and several episodes' videos in one file.

Read next: `lerobot_writer.py`; `lerobot_video.py` decodes them. A key frame every second frame, as lerobot has it, so
that any frame costs two to decode. Encoding is the encoder's own threads' work; joining copies packets, no pixel is
touched again.
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

from openpi_train.data.lerobot.lerobot_layout import require

Codec = Literal["av1", "h264"]
# FFmpeg's encoder and its options, as in lerobot 0.4.4 (`datasets/video_utils.py`).
_ENCODERS = {
    "av1": ("libsvtav1", {"g": "2", "crf": "30", "preset": "12"}),
    "h264": ("libx264", {"g": "2", "crf": "30"}),
}


def encode(path: Path, frames: Iterable[np.ndarray], size: tuple[int, int], *, fps: int, codec: Codec) -> int:
    """Write frames, uint8 [height, width, 3], as one video at `path`, on disk when this returns; how many there were.

    Raises ValueError for a size that the codec does not take.
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
    """Start encoding the container's streams, with all threads as urgent as this one was.

    Run by root, as in most containers, SVT-AV1 makes this thread and its own real-time ones (SCHED_FIFO, 99): on a
    machine whose cores they fill nothing else has its turn, and every process started later inherits it.
    """
    # It also tells the terminal twenty lines of its settings for every video unless it may only report errors.
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
            with contextlib.suppress(ProcessLookupError):  # one that has ended
                os.sched_setscheduler(thread, policy, priority)


def _threads() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}


def join(paths: Sequence[Path], lengths: Sequence[int], out: Path, *, fps: int) -> None:
    """One video of several, each with its number of frames; an episode begins where the one before it ends.

    Raises ValueError where their encoders were set differently.
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
                    raise ValueError(f"{path} and {paths[0]} were encoded with other settings: they cannot be one file")
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
    """What `info.json` says of a camera's videos."""
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
