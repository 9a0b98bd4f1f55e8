"""Checkpoints that are written for diffusion_policy, with absolute robots: their files, and our numbers.

`recorded/record_diffusion_policy_actions.py` has its own normaliser read them; `test_diffusion_policy_actions.py`
compares.
"""

import dataclasses
import hashlib
import zipfile
from pathlib import Path

import lerobot_exports
import numpy as np
from exchanged import TINY, as_stored, made_up

from openpi_train.data.robot.normalize import parse_norm_stats
from openpi_train.data.robot.transforms import Normalize
from openpi_train.data.robot.translation import Translation
from openpi_train.models.diffusion_policy import DiffusionPolicyConfig, diffusion_policy_checkpoint
from openpi_train.robots.droid import Droid
from openpi_train.robots.libero import Libero
from openpi_train.robots.pusht import PushT
from openpi_train.robots.robotwin import RoboTwin

CASES = {
    "robotwin-min_max": (RoboTwin(), "min_max"),
    "pusht-min_max": (PushT(), "min_max"),
    "libero-z_score": (Libero(), "z_score"),
    "droid-quantile": (Droid(), "quantile"),
}


def model_of(name: str) -> DiffusionPolicyConfig:
    """The model of a case."""
    return dataclasses.replace(lerobot_exports.diffusion(CASES[name][0]), pooling="average", relu_features=False)


def write(folder: Path, name: str) -> None:
    """The checkpoint of a case, as `convert --to diffusion_policy` writes it."""
    robot, form = CASES[name]
    model = model_of(name)
    stored = dataclasses.replace(
        as_stored(made_up(dataclasses.replace(TINY, model=model))),
        norm_stats={"robot": lerobot_exports.norm_stats(robot)},
        robots={"robot": robot},
        trained_with={"objective.sampler": "ddpm", "data.normalization": form},
    )
    with lerobot_exports.narrow():
        diffusion_policy_checkpoint.prepare(stored, model)(folder)


def digest(folder: Path) -> str:
    """Of what the checkpoint's file holds, which is a zip file with times."""
    with zipfile.ZipFile(folder / diffusion_policy_checkpoint.FILE) as file:
        names = sorted(file.namelist())
        return hashlib.sha256(b"".join(name.encode() + file.read(name) for name in names)).hexdigest()


def computed(name: str) -> dict[str, np.ndarray]:
    """What we compute: see `lerobot_exports.computed`."""
    robot, form = CASES[name]
    given, window = lerobot_exports.inputs(robot), model_of(name).rows.window
    normalize = Normalize(parse_norm_stats(lerobot_exports.norm_stats(robot), "made up"), form)
    seen, target = robot.to_model(given["state"], given["target"])
    rows = normalize({"state": seen, "actions": target})
    translation = Translation(robot=robot, normalize=normalize, transforms=(), spec={}, window=window)
    # A chunk begins with the first observed step.
    actions = translation.actions(given["output"], given["state"])
    return {"state": rows["state"], "target": rows["actions"], "actions": actions}
