"""Where the files of a LeRobot dataset contradict its metadata: depth in cameras, another rate.

Read next: `lerobot_index.py`, the caller.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from openpi_train.data.core import image
from openpi_train.data.core.findings import Finding
from openpi_train.data.formats.lerobot.depth import is_deep_video
from openpi_train.data.formats.lerobot.episodes import Scanned
from openpi_train.data.formats.lerobot.lerobot_layout import LeRobotLayout
from openpi_train.data.formats.lerobot.lerobot_video import Video

# A larger difference between a rate and that of the timestamps is no rounding (29.97 and 30).
_SAME_RATE = 0.01


def without_deep_cameras(
    layout: LeRobotLayout,
    good: Sequence[Scanned],
    videos: Mapping[str, Video],
    pictures: Path,
    number: Mapping[str, int],
) -> tuple[LeRobotLayout, list[Finding]]:
    """The layout without cameras whose files hold depth, whatever the metadata say; a finding for each grey camera.

    Args: `pictures` is the folder of copied pictures, `number` that of each data file. One video of depth is enough; of
    pictures the first one is looked at, and later ones of 16 bits are bad records.
    """
    deep, findings = {}, []
    for name, camera in layout.cameras.items():
        if not good:
            continue
        if camera.is_video:
            file = good[0].episode.clips[name].file
            every = [videos[entry.episode.clips[name].file].pixels for entry in good]
            pixels = next(filter(is_deep_video, every), every[0])
            is_deep, is_grey = is_deep_video(pixels), pixels in ("gray", "gray8")
        else:
            file = good[0].episode.data
            offset, length = good[0].spans[name][0].tolist()
            with (pictures / f"{number[file]}.bin").open("rb") as stored:
                stored.seek(offset)
                pixels = image.pixel_mode(stored.read(length))
            is_deep, is_grey = image.is_deep(pixels), image.is_grey(pixels)
        if is_deep:
            deep[name] = f"a depth map by the pixels of its files, {pixels}"
        elif is_grey:
            findings.append(image.grey_camera(name, file))
    cameras = {name: camera for name, camera in layout.cameras.items() if name not in deep}
    return dataclasses.replace(layout, cameras=cameras, skipped={**layout.skipped, **deep}), findings


def other_rates(fps: float | None, good: Sequence[Scanned]) -> list[Finding]:
    """A finding if the timestamps of an episode's steps lie apart otherwise than `fps` says."""
    if not fps:
        return []
    periods = np.array([entry.period_s for entry in good])
    # Not those of one step, whose period is NaN, nor timestamps that stand still, which are a kind of their own.
    wrong = np.flatnonzero((np.abs(periods * fps - 1) > _SAME_RATE) & (periods > 0))
    if not len(wrong):
        return []
    first = good[int(wrong[0])].episode
    return [
        Finding(
            kind="another rate",
            count=len(wrong),
            total=len(good),
            unit="episodes",
            where=f"{first.data}, episode {first.number}",
            what=f"meta/info.json says {fps:g} steps per second, their timestamps {1 / np.median(periods[wrong]):.4g}",
            training="steps follow each other as they are recorded, and the rate is taken to be the first one",
            remedy="Correct fps in meta/info.json, or the timestamps",
        )
    ]
