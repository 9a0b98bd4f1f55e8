"""Index of a video file's frames, and decoding of single frames without opening the file again.

Read next: `lerobot_source.py`, which reads frames. A file's container is read once, while indexing. Afterwards a frame
needs one read for each packet from its key frame on (every second frame of LeRobot's is a key frame) and decoding of
these; a thread keeps one decoder for all files of one encoding. PyAV is imported by the first function that needs it.
"""

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.data.core.damage import raise_if_system
from openpi_train.data.formats.lerobot.lerobot_metadata import require

# Maximum number of decoders per thread, one per encoding; a dataset has one or two.
_DECODERS = 8


@dataclasses.dataclass(frozen=True)
class Encoding:
    """Parameters of a decoder: FFmpeg's codec name, and the container's header values."""

    decoder: str
    header: str
    colorspace: int
    color_range: int


@dataclasses.dataclass(frozen=True)
class Video:
    """The index of one file. `problem` says why it cannot be read; all arrays are then empty.

    Attributes:
        size: height and width of its frames, as the container says.
        packets: int64 [packets, 3] in decoding order: byte offset, size, presentation time in the stream's units.
        times: float64 [frames], seconds, ascending.
        frames: int64 [frames, 2]: the packet to begin decoding with, and the frame's own.
        pixels: FFmpeg's name of the pixel format, such as "yuv420p".
    """

    encoding: Encoding | None
    packets: np.ndarray
    times: np.ndarray
    frames: np.ndarray
    size: tuple[int, int] = (0, 0)
    problem: str = ""
    pixels: str = ""

    def find(self, times: np.ndarray, tolerance_s: float) -> np.ndarray:
        """The frame nearest to each time (s), int64 [n]; -1 if none is within `tolerance_s`."""
        if not len(self.times):
            return np.full(len(times), -1)
        after = np.clip(np.searchsorted(self.times, times), 1, max(1, len(self.times) - 1))
        nearest = np.stack([after - 1, np.minimum(after, len(self.times) - 1)])
        distance = np.abs(self.times[nearest] - times)
        best = nearest[distance.argmin(axis=0), np.arange(len(times))]
        return np.where(distance.min(axis=0) < tolerance_s, best, -1)


def scan(path: Path) -> Video:
    """Index a file from its container, without decoding. A damaged file gives a `Video` with a `problem`.

    Raises OSError if the system fails.
    """
    av = require("av")
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise ValueError("it holds no video")
            stream = container.streams.video[0]
            context, time_base = stream.codec_context, float(stream.time_base)
            pixels = context.pix_fmt or ""
            encoding = Encoding(
                context.name, (context.extradata or b"").hex(), int(context.colorspace), int(context.color_range)
            )
            rows, size = [], (int(context.height), int(context.width))
            for packet in container.demux(stream):
                if packet.size and packet.pts is not None:
                    if not rows:
                        _check_raw(path, packet)
                    rows.append((packet.pos, packet.size, packet.pts, packet.is_keyframe, packet.is_discard))
    except (av.FFmpegError, ValueError, OSError) as error:
        raise_if_system(error, path)
        return unreadable(f"{path.name} is not a readable video: {error}")
    table = np.array(rows, np.int64).reshape(-1, 5)
    table = table[np.cumsum(table[:, 3]) > 0]  # nothing can be decoded before the first key frame
    table = table[: _whole(table, path.stat().st_size)]
    starts = _starts(table[:, 2], table[:, 3] > 0)
    shown = np.flatnonzero(table[:, 4] == 0)
    shown = shown[np.argsort(table[shown, 2], kind="stable")]
    times = table[shown, 2] * time_base
    found = np.stack([starts[shown], shown], axis=1)
    return Video(encoding, table[:, :3], times, found, size, pixels=pixels)


def unreadable(problem: str) -> Video:
    """A video without frames."""
    return Video(None, np.empty((0, 3), np.int64), np.empty(0), np.empty((0, 2), np.int64), problem=problem)


def _check_raw(path: Path, packet: Any) -> None:
    """Raise ValueError if the file's bytes of a packet differ from what a decoder needs."""
    with path.open("rb") as file:
        file.seek(max(packet.pos or 0, 0))
        if file.read(packet.size) != bytes(packet):
            raise ValueError("its packets are not stored unchanged; remux it as mp4")


def _whole(table: np.ndarray, size: int) -> int:
    """Number of packets before the first one that is missing from a truncated file."""
    lost = np.flatnonzero(table[:, 0] + table[:, 1] > size)
    return int(lost[0]) if len(lost) else len(table)


def _starts(times: np.ndarray, is_key: np.ndarray) -> np.ndarray:
    """The packet at which decoding must begin for each packet, int64 [packets].

    This is the preceding key frame; or the one before that, for a packet that is displayed before its key frame, since
    it may refer to frames on both sides (an open group of pictures).
    """
    key = np.maximum.accumulate(np.where(is_key, np.arange(len(times)), 0))
    leading = times < times[key]
    return np.where(leading, key[np.maximum(key - 1, 0)], key)


class _Decoders(threading.local):
    """The decoders of one thread. They keep state between packets, so threads cannot share them."""

    def __init__(self):
        self.opened: OrderedDict[Encoding, Any] = OrderedDict()

    def get(self, encoding: Encoding) -> tuple[Any, Any]:
        """An idle decoder, and its converter to RGB, which is kept because it caches tables."""
        if encoding not in self.opened:
            av = require("av")
            context = av.CodecContext.create(encoding.decoder, "r")
            # The rows of a batch are already read in parallel.
            context.thread_count = 1
            context.extradata = bytes.fromhex(encoding.header) or None
            context.colorspace, context.color_range = encoding.colorspace, encoding.color_range
            self.opened[encoding] = context, require("av.video.reformatter").VideoReformatter()
            if len(self.opened) > _DECODERS:
                self.opened.popitem(last=False)
        self.opened.move_to_end(encoding)
        return self.opened[encoding]


_decoders = _Decoders()


def decode(encoding: Encoding, packets: Sequence[tuple[bytes, int]], wanted: set[int]) -> dict[int, np.ndarray]:
    """The frames of these presentation times, uint8 [height, width, 3] (RGB, by FFmpeg's conversion).

    Args: `packets` in decoding order, each with its presentation time, from a key frame to the last wanted one.
    Raises ValueError if decoding fails.
    """
    av = require("av")
    decoder, converter = _decoders.get(encoding)
    found = {}
    try:
        for data, time in (*packets, (None, 0)):  # None flushes the decoder
            if len(found) == len(wanted):
                break
            packet = None
            if data is not None:
                packet = av.Packet(data)
                packet.pts = time
            for frame in decoder.decode(packet):
                if frame.pts in wanted:
                    found[frame.pts] = converter.reformat(frame, format="rgb24").to_ndarray()
    except av.FFmpegError as error:
        raise ValueError(f"cannot decode the video: {error}") from error
    finally:
        decoder.flush_buffers()
    if len(found) < len(wanted):
        raise ValueError(f"cannot decode the video: {len(wanted) - len(found)} of {len(wanted)} frames are missing")
    return found
