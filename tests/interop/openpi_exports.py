"""Checkpoints that are written for openpi, with robots of all kinds of actions: their norm stats, and our numbers.

`recorded/record_openpi_actions.py` has openpi's transforms read them; `test_openpi_actions.py` compares.
"""

import dataclasses
import hashlib
from pathlib import Path

import lerobot_exports
import numpy as np
from exchanged import as_stored, made_up

from openpi_train.data.robot.normalize import Form, read_norm_stats
from openpi_train.data.robot.transforms import Normalize
from openpi_train.data.robot.translation import Translation
from openpi_train.data.robot.windows import WindowShape
from openpi_train.interop import openpi
from openpi_train.robots.aloha import Aloha
from openpi_train.robots.bridge import Bridge
from openpi_train.robots.droid import Droid
from openpi_train.robots.libero import Libero
from openpi_train.robots.ur5 import UR5

ROBOTS = {
    "aloha": Aloha(),
    "aloha-absolute": Aloha(relative=False),
    "aloha-as-recorded": Aloha(adapt_to_pi=False),
    "droid-velocity": Droid(),
    "droid-position": Droid(action="joint_position"),
    "libero": Libero(),
    "libero-extra-delta": Libero(extra_delta=True),
    "ur5": UR5(),
    "bridge-trajectory": Bridge(trajectory=True),
    "all": lerobot_exports.Masked(names=("x_m", "y_m", "z_m"), mask=(True, True, True)),
}


def inputs(name: str) -> dict[str, np.ndarray]:
    """As `lerobot_exports.inputs`, with states in the range of grippers."""
    given = lerobot_exports.inputs(ROBOTS[name])
    return {**given, "state": np.abs(given["state"])}


def write(folder: Path, name: str) -> None:
    """The checkpoint of a case, as `convert --to openpi` writes it."""
    stored = dataclasses.replace(as_stored(made_up()), norm_stats={"robot": lerobot_exports.norm_stats(ROBOTS[name])})
    openpi.write(folder, stored)


def digest(folder: Path) -> str:
    """Of the norm stats, which are all that a checkpoint says of actions."""
    return hashlib.sha256((folder / "assets" / "robot" / "norm_stats.json").read_bytes()).hexdigest()


def computed(folder: Path, name: str, form: Form) -> dict[str, np.ndarray]:
    """What we compute with the norm stats in the checkpoint: see `lerobot_exports.computed`."""
    robot, given = ROBOTS[name], inputs(name)
    normalize = Normalize(read_norm_stats(folder / "assets" / "robot"), form)
    window = WindowShape(horizon=len(given["output"]))
    translation = Translation(robot=robot, normalize=normalize, transforms=(), spec={}, window=window)
    seen, target = robot.to_model(given["state"], given["target"])
    rows = normalize({"state": seen, "actions": target})
    actions = translation.actions(given["output"], given["state"])
    return {"state": rows["state"], "target": rows["actions"], "actions": actions}
