"""Which image features of a LeRobot dataset are depth maps, or may be. Read next: `lerobot_layout.py`.

LeRobot 0.6 marks depth by `is_depth_map` in a feature's `info` (`datasets/dataset_metadata.py: depth_keys`), earlier
versions by `video.is_depth_map` there or in `video_info`; it is one channel of 12 bits (`gray12le`), or TIFF.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from openpi_train.json_object import JsonObject

_FLAG, _PIXELS = "is_depth_map", "pix_fmt"
_CHANNELS = ("channels", "channel")


def depth_reason(feature: JsonObject) -> str:
    """Why an image feature is no camera as far as its metadata say; empty if it is one."""
    said = [*_entries(feature)]
    flags = {key: value for key, value in said if key.rpartition(".")[2] == _FLAG}
    if any(flag is True or str(flag).lower() in ("true", "1") for flag in flags.values()):
        return "a depth map"
    for key, value in said:
        if key.rpartition(".")[2] == _PIXELS and is_deep_video(str(value)):
            return f"a depth map by its pixels, {value}"
    # Up to 0.4, LeRobot wrote `video.is_depth_map` false for every video, so that only the other key says no.
    if num_channels(feature) == 1 and _FLAG not in flags:
        return (
            'pictures of one channel, a depth map or grey; if they are grey pictures, add "is_depth_map": false to the '
            "feature's info in meta/info.json"
        )
    return ""


def num_channels(feature: JsonObject) -> int:
    """The channels of an image feature of three dims; those of the last one if nothing says which it is."""
    shape, names = feature["shape"], list(feature.get("names") or ())
    places = [place for place, name in enumerate(names) if name in _CHANNELS]
    return int(shape[places[0] if places and len(names) == len(shape) else -1])


def is_deep_video(pixels: str) -> bool:
    """Whether FFmpeg's pixel format is one of depth: grey of more than 8 bits, or YUV of 12 or more (10 is HDR)."""
    return bool(re.match(r"gray(?!8?$)|p01[26]|yuv\w*p1[246]", pixels))


def _entries(nested: JsonObject) -> Iterator[tuple[str, Any]]:
    for key, value in nested.items():
        if isinstance(value, Mapping):
            yield from _entries(value)
        else:
            yield key, value
