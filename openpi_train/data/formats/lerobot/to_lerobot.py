"""Writes any source as a LeRobot dataset. Read next: `lerobot_writer.py`."""

from pathlib import Path
from typing import Any

from openpi_train.data.core.source import stored_name
from openpi_train.data.formats.conversion import Conversion
from openpi_train.data.formats.lerobot.features import Version
from openpi_train.data.formats.lerobot.lerobot_writer import LeRobotWriter

_VIDEO = ("av1", "h264")


def write(conversion: Conversion, out: Path, *, version: Version) -> None:
    """Write the conversion to `out`, continuing after the last episode of an interrupted attempt.

    Raises ValueError if the control rate is unknown or not a whole number, FileExistsError, OSError.
    """
    about, is_video = conversion.about, conversion.pictures in _VIDEO
    if about.control_hz is None:
        raise ValueError("the dataset does not give its control rate, which LeRobot's format needs: give --control-hz")
    if about.control_hz % 1:
        raise ValueError(
            f"the control rate is {about.control_hz:g} Hz, but LeRobot's format needs a whole one: give --control-hz "
            f"{max(1, round(about.control_hz))} to write the steps' times at that rate"
        )
    features: dict[str, dict[str, Any]] = {}
    for name, column in conversion.columns.items():
        names = about.dim_names.get(name) or None
        features[stored_name(name)] = {"dtype": column.dtype.name, "shape": column.shape[1:] or (1,), "names": names}
    for camera, size in conversion.sizes.items():
        features[stored_name(camera)] = {"dtype": "video" if is_video else "image", "shape": (*size, 3)}
    writer = LeRobotWriter(
        out,
        fps=about.control_hz,
        features=features,
        robot_type=about.robot_type,
        version=version,
        codec="h264" if conversion.pictures == "h264" else "av1",
        identity={"source": conversion.source.fingerprint, "pictures": conversion.pictures},
    )
    frames = conversion.frames if is_video else conversion.encoded
    for steps in conversion.episodes(writer.num_episodes):
        columns = {stored_name(name): column[steps.start : steps.stop] for name, column in conversion.columns.items()}
        pictures = {stored_name(camera): frames(steps, camera) for camera in conversion.source.cameras}
        writer.add_episode(columns, pictures, task=conversion.prompts(steps))
    writer.finish()
