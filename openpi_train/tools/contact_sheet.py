"""A picture of a dataset: a line of frames for every camera of some episodes. Read next: `inspect_data.py`."""

import numpy as np
from PIL import Image, ImageDraw

from openpi_train.data import summary
from openpi_train.data.source import BadRecord, Source

_WIDTH, _GAP, _LABEL = 128, 4, 14
_BAD = (160, 0, 0)


def contact_sheet(source: Source, episodes: list[int], frames: int) -> Image.Image:
    """`frames` pictures of each camera and episode, from the first step to the last; unreadable ones are red."""
    lines = [(episode, camera) for episode in episodes for camera in source.cameras]
    height = _thumbnail_height(source, episodes)
    sheet = Image.new("RGB", (frames * (_WIDTH + _GAP) + _GAP, len(lines) * (height + _LABEL + _GAP) + _GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for line, (episode, camera) in enumerate(lines):
        top = _GAP + line * (height + _LABEL + _GAP)
        steps = summary.spread(source, episode, frames)
        prompt = str(source.prompts[int(source.prompt_index[steps[0]])])
        draw.text((_GAP, top), _printable(f"episode {episode}, {camera}: {prompt}"), fill="black")
        for column, step in enumerate(steps):
            place = (_GAP + column * (_WIDTH + _GAP), top + _LABEL)
            sheet.paste(_thumbnail(source, step, camera, height), place)
    return sheet


def _thumbnail_height(source: Source, episodes: list[int]) -> int:
    """The height that fits all cameras' pictures at their common width."""
    heights = [1]
    for camera in source.cameras:
        for episode in episodes:
            try:
                frame = source.frames(summary.spread(source, episode, 1), camera)[0]
            except BadRecord:
                continue
            heights.append(round(_WIDTH * frame.shape[0] / frame.shape[1]))
            break
    return max(heights)


def _thumbnail(source: Source, step: np.int64, camera: str, height: int) -> Image.Image:
    try:
        picture = Image.fromarray(source.frames(np.array([step]), camera)[0])
    except BadRecord:
        return Image.new("RGB", (_WIDTH, height), _BAD)
    return picture.resize((_WIDTH, min(height, round(_WIDTH * picture.height / picture.width))))


def _printable(text: str) -> str:
    """The text in the letters that pillow's own font has."""
    return text.encode("latin-1", "replace").decode("latin-1")
