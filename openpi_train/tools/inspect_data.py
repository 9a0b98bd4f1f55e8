"""`data inspect`: show a dataset as text and pictures before training.

Read next: `data/check/summary.py`, and `data/check/fault_kinds.py` for what is suspicious.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw
from rich.table import Table

from openpi_train.data.check import summary
from openpi_train.data.check.examined import ExaminedData
from openpi_train.data.check.fault_kinds import examine
from openpi_train.data.core.instructions import unlabeled_episodes
from openpi_train.data.core.source import BadRecord, Source
from openpi_train.robots.robot import Robot
from openpi_train.tools.stats import as_text

_EPISODES, _FRAMES, _PROMPTS = 6, 8, 10
# Pixels of the contact sheet; unreadable pictures are red.
_WIDTH, _GAP, _LABEL = 128, 4, 14
_BAD = (160, 0, 0)


def inspect(name: str, source: Source, robot: Robot | None = None, *, out: Path | None = None) -> str:
    """Describe a dataset as text; with `out` also write `<out>/<name>.txt` and a contact sheet `<out>/<name>.png`.

    Args: with `robot` columns are read as its state and actions, in its names.
    """
    episodes = summary.some_episodes(source, _EPISODES)
    parts = [_overview(name, source, robot), _numbers(source, robot), _cameras(source, robot, episodes)]
    parts.append(_suspicious(name, source, robot))
    text = "\n".join(parts)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        stem = re.sub(r"[^\w.-]+", "_", name)
        (out / f"{stem}.txt").write_text(text, encoding="utf-8")
        contact_sheet(source, episodes, _FRAMES).save(out / f"{stem}.png")
        text += f"written to {out / stem}.txt and .png\n"
    return text


def _overview(name: str, source: Source, robot: Robot | None) -> str:
    lengths, about = np.diff(source.episode_ends, prepend=0), source.about()
    rate = about.control_hz or (robot.control_hz if robot else None)
    duration = f", {source.num_steps / rate / 60:.1f} min" if rate else ""
    lines = {
        "episodes": f"{source.num_episodes}, of {lengths.min()} to {lengths.max()} control steps, median "
        f"{np.median(lengths):g}",
        "control steps": f"{source.num_steps}{duration}",
        "control rate": _rate(about.control_hz, robot),
        "bad episodes": f"{source.num_dropped} left out" if source.num_dropped else "none",
    }
    copies = source.num_episodes - len(set(source.episode_ids))
    if copies:
        lines["copies"] = f"{copies} episodes are copies of others"
    prompts = summary.steps_of_prompts(source)
    lines["instructions"] = f"{len(prompts)}"
    none = int(unlabeled_episodes(source.prompts, source.prompt_index, source.episode_ends).sum())
    if none:
        lines["no instruction"] = f"{none} of {source.num_episodes} episodes"
    lines |= {f"  {text!r}": f"{steps} steps" for text, steps in [*prompts.items()][:_PROMPTS]}
    if len(prompts) > _PROMPTS:
        lines["  ..."] = f"{len(prompts) - _PROMPTS} more"
    lines |= {f"not read: {feature}": why for feature, why in about.left_out.items()}
    width = max(map(len, lines))
    return "\n".join([name, *(f"  {label:<{width}}  {what}" for label, what in lines.items()), ""])


def _rate(said: float | None, robot: Robot | None) -> str:
    if said is None:
        return f"{robot.control_hz:g} Hz by its robot" if robot else "not said by the dataset"
    if robot is not None and abs(robot.control_hz - said) > 1e-3:
        return f"{said:g} Hz, but its robot says {robot.control_hz:g}: which is it?"
    return f"{said:g} Hz"


def _numbers(source: Source, robot: Robot | None) -> str:
    columns: Mapping[str, np.ndarray] = source.columns
    names: Mapping[str, Sequence[str]] = source.about().dim_names
    if robot is not None:
        steps = robot.read(source.columns, source.episode_ends)
        columns = {"state": steps.state, "actions": steps.actions}
        names = {"state": robot.state_names, "actions": robot.action_names}
    table = Table(title="numbers", title_justify="left")
    table.add_column("column")
    table.add_column("dim")
    for header in ("min", *(f"q{round(100 * level):02d}" for level in summary.QUANTILES), "max"):
        table.add_column(header, justify="right")
    for column in sorted(columns):
        for number, dim in enumerate(summary.dims(column, columns[column], names.get(column, ()))):
            values = (f"{value:.4g}" for value in (dim.low, *dim.quantiles, dim.high))
            table.add_row("" if number else column, "" if dim.name == column else dim.name, *values)
    return as_text(table)


def _cameras(source: Source, robot: Robot | None, episodes: Sequence[int]) -> str:
    table = Table(title="cameras", title_justify="left")
    for header in ("camera", "pixels", "brightness"):
        table.add_column(header)
    slots = {camera: slot for slot, camera in (robot.cameras if robot else {}).items()}
    for camera in summary.cameras(source, episodes, _FRAMES):
        size = f"{camera.size[0]} x {camera.size[1]}" if camera.size else ""
        name = f"{camera.name} ({slots[camera.name]})" if camera.name in slots else camera.name
        table.add_row(name, size, f"{camera.brightness:.0f} of 255")
    return as_text(table)


def _suspicious(name: str, source: Source, robot: Robot | None) -> str:
    """A line for each finding of `data check`, judged by as many pictures as are shown."""
    found = examine(ExaminedData(name=name, source=source, robot=robot, num_frames=_EPISODES * _FRAMES))
    lines = [finding.line() for finding in found] or ["nothing found"]
    return "\n".join(["suspicious (docs/howto/check_data.md)", *(f"  {line}" for line in lines), ""])


def contact_sheet(source: Source, episodes: list[int], frames: int) -> Image.Image:
    """`frames` pictures of each camera and episode, from the first step to the last; unreadable ones are red."""
    lines = [
        (episode, camera, summary.spread(source, episode, frames)) for episode in episodes for camera in source.cameras
    ]
    pictures = [[_thumbnail(source, step, camera) for step in steps] for _, camera, steps in lines]
    height = max((one.height for row in pictures for one in row if one is not None), default=1)
    sheet = Image.new("RGB", (frames * (_WIDTH + _GAP) + _GAP, len(lines) * (height + _LABEL + _GAP) + _GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for line, (episode, camera, steps) in enumerate(lines):
        top = _GAP + line * (height + _LABEL + _GAP)
        title = f"episode {episode}, {camera}: {source.prompts[int(source.prompt_index[steps[0]])]}"
        # In the characters that pillow's own font has.
        draw.text((_GAP, top), title.encode("latin-1", "replace").decode("latin-1"), fill="black")
        for column, picture in enumerate(pictures[line]):
            place = (_GAP + column * (_WIDTH + _GAP), top + _LABEL)
            sheet.paste(picture or Image.new("RGB", (_WIDTH, height), _BAD), place)
    return sheet


def _thumbnail(source: Source, step: np.int64, camera: str) -> Image.Image | None:
    """A picture in the common width; None if it cannot be read."""
    try:
        picture = Image.fromarray(source.frames(np.array([step]), camera)[0])
    except BadRecord:
        return None
    return picture.resize((_WIDTH, round(_WIDTH * picture.height / picture.width)))
