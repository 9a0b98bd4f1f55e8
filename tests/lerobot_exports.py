"""Policies of every type that is written for LeRobot, with robots of all kinds of actions: folders, and our numbers.

`recorded/record_lerobot_relative.py` has the folders made and LeRobot's processors load them; the test compares. Models
are tiny, their weights made up: the steps around them depend on neither.
"""

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
from exchanged import TINY, as_stored, made_up, tiny

from openpi_train.checkpoints import lerobot_policy
from openpi_train.data.robot.normalize import parse_norm_stats
from openpi_train.data.robot.transforms import Normalize
from openpi_train.data.robot.translation import Translation
from openpi_train.models.act import ActConfig
from openpi_train.models.diffusion_policy import DiffusionPolicyConfig, diffusion_policy_checkpoint, lerobot_diffusion
from openpi_train.models.diffusion_policy.denoisers import UnetSizes
from openpi_train.models.model_config import PolicyConfig
from openpi_train.models.pi0_fast import Pi0FastConfig
from openpi_train.models.smolvla import SmolVlaConfig
from openpi_train.nn.siglip import SiglipConfig
from openpi_train.robots.aloha import Aloha
from openpi_train.robots.arm import Arm
from openpi_train.robots.bridge import Bridge
from openpi_train.robots.droid import Droid
from openpi_train.robots.libero import Libero
from openpi_train.robots.openx import OpenX
from openpi_train.robots.robot import Robot
from openpi_train.robots.ur5 import UR5

_WIDTHS = (16,)
HORIZON = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Masked(Arm):
    """An arm with any names and relative dims."""

    names: tuple[str, ...]
    mask: tuple[bool, ...]

    control_hz = 10.0

    @property
    def state_names(self) -> tuple[str, ...]:
        return (*(f"{name}_now" for name in self.names), "force_n")

    @property
    def action_names(self) -> tuple[str, ...]:
        return self.names

    @property
    def delta_mask(self) -> tuple[bool, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.mask


_PI0 = {name: getattr(TINY.model, name) for name in ("language", "siglip", "image_size", "vocab_size")}
# LeRobot knows only the published names of sizes.
_NAMED = {"paligemma_variant": "gemma_2b"}
_SMALL = {"dtype": "float32", "remat": "none", "action_horizon": HORIZON}


def pi0(robot: Robot, **changes) -> PolicyConfig:
    named = {**_NAMED, "action_expert_variant": "gemma_300m"}
    return dataclasses.replace(tiny(action_dim=16, action_horizon=HORIZON).model, **named, **changes)


def pi0_fast(robot: Robot) -> PolicyConfig:
    return Pi0FastConfig(action_dim=16, **_NAMED, **_PI0, **_SMALL)


def act(robot: Robot) -> PolicyConfig:
    return ActConfig(
        cameras=("top",),
        image_height=32,
        image_width=32,
        backbone_widths=(8, 8, 8, 8),
        action_dim=len(robot.action_names),
        state_dim=len(robot.state_names),
        dim_model=8,
        n_heads=2,
        dim_feedforward=8,
        n_encoder_layers=1,
        n_decoder_layers=1,
        latent_dim=4,
        **_SMALL,
    )


def diffusion(robot: Robot) -> PolicyConfig:
    return DiffusionPolicyConfig(
        action_dim=len(robot.action_names),
        state_dim=len(robot.state_names),
        image_height=16,
        image_width=16,
        encoder_widths=_WIDTHS,
        unet=UnetSizes(widths=(8, 8), kernel_size=3, num_groups=4),
        diffusion_step_embed_dim=8,
        pooling="spatial_softmax",
        num_keypoints=4,
        relu_features=True,
        n_obs_steps=2,
        n_action_steps=2,
        action_horizon=HORIZON,
    )


def smolvla(robot: Robot) -> PolicyConfig:
    return SmolVlaConfig(
        image_size=32,
        siglip=SiglipConfig(width=8, depth=1, mlp_dim=8, num_heads=2, patch_size=8),
        pixel_shuffle=2,
        num_vlm_layers=2,
        width=8,
        mlp_dim=8,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        action_dim=16,
        vocab_size=32,
        **_SMALL,
    )


_ALL = Masked(names=("x_m", "y_m", "z_m"), mask=(True, True, True))
# The name of the absolute dim is a part of the others', and LeRobot excludes by parts of names.
_PARTS = Masked(names=("joint_1", "joint_10", "joint_11"), mask=(False, True, True))
# By name: a model, and a robot.
CASES = {
    "pi0-absolute-libero": (pi0, Libero()),
    "pi0-absolute-bridge": (pi0, Bridge()),
    "pi0-absolute-droid": (pi0, Droid()),
    "pi0-absolute-openx": (pi0, OpenX(layout="taco_play")),
    "pi0-partly-bridge": (pi0, Bridge(trajectory=True)),
    "pi0-partly-two-arms": (pi0, Bridge(trajectory=True, num_arms=2)),
    "pi0-all": (pi0, _ALL),
    "pi0-parts-of-names": (pi0, _PARTS),
    "pi05-partly-droid": (lambda robot: pi0(robot, pi05=True), Droid(action="joint_position")),
    "pi05-partly-aloha": (lambda robot: pi0(robot, pi05=True), Aloha(adapt_to_pi=False)),
    "pi0_fast-partly-ur5": (pi0_fast, UR5()),
    "pi0_fast-absolute-libero": (pi0_fast, Libero()),
    "smolvla-partly-bridge": (smolvla, Bridge(trajectory=True)),
    "act-absolute-aloha": (act, Aloha(adapt_to_pi=False, relative=False)),
    "act-partly-aloha": (act, Aloha(adapt_to_pi=False)),
    "diffusion-partly-ur5": (diffusion, UR5()),
    "diffusion-all": (diffusion, _ALL),
}


def norm_stats(robot: Robot) -> dict:
    """Made-up norm stats of a robot's states and actions, each dim of its own."""
    random, found = np.random.default_rng(3), {}
    for name, width in (("state", len(robot.state_names)), ("actions", len(robot.action_names))):
        low = random.uniform(-2, -1, width).round(3)
        mean, std = random.uniform(-0.5, 0.5, width).round(3), random.uniform(0.5, 2, width).round(3)
        values = {"mean": mean, "std": std, "q01": low + 0.25, "q99": low + 2.5, "min": low, "max": low + 4}
        found[name] = {key: value.tolist() for key, value in values.items()}
    return {"norm_stats": found}


def inputs(robot: Robot) -> dict[str, np.ndarray]:
    """A state [s], what the model gave for it [h, a], normalised, and actions [h, a] to train on."""
    random, width = np.random.default_rng(4), len(robot.action_names)
    return {
        "state": random.uniform(-1, 1, len(robot.state_names)).astype(np.float32),
        "output": random.uniform(-1, 1, (HORIZON, width)).astype(np.float32),
        "target": random.uniform(-1, 1, (HORIZON, width)).astype(np.float32),
    }


@contextlib.contextmanager
def narrow() -> Iterator[None]:
    """Image encoders of these widths may be converted."""
    with (
        mock.patch.object(lerobot_diffusion, "WIDTHS", _WIDTHS),
        mock.patch.object(diffusion_policy_checkpoint, "WIDTHS", _WIDTHS),
    ):
        yield


def write(folder: Path, name: str) -> None:
    """The folder of a case, as `convert --to lerobot` writes it."""
    make, robot = CASES[name]
    model = make(robot)
    params = made_up(dataclasses.replace(TINY, model=model))
    stored = dataclasses.replace(as_stored(params), norm_stats={"robot": norm_stats(robot)}, robots={"robot": robot})
    if isinstance(model, DiffusionPolicyConfig):
        stored = dataclasses.replace(stored, trained_with={"objective.sampler": "ddpm"})
    with narrow():
        lerobot_policy.write(folder, stored, model)


def digest(folder: Path) -> str:
    """Of the files that LeRobot's processors and config are made from."""
    files = sorted(path for path in folder.iterdir() if path.name != "model.safetensors")
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in files)).hexdigest()


def computed(name: str) -> dict[str, np.ndarray]:
    """What we compute: `state` and `target` as the model sees them, and the robot's `actions` of its `output`."""
    make, robot = CASES[name]
    model, given = make(robot), inputs(robot)
    normalize = Normalize(parse_norm_stats(norm_stats(robot), "made up"), model.rows.normalization)
    translation = Translation(robot=robot, normalize=normalize, transforms=(), spec={}, window=model.rows.window)
    seen, target = robot.to_model(given["state"], given["target"])
    rows = normalize({"state": seen, "actions": target})
    whole = np.concatenate([np.zeros_like(given["output"][: -model.rows.window.first_action or 0]), given["output"]])
    actions = translation.actions(whole, given["state"])
    return {"state": rows["state"], "target": rows["actions"], "actions": actions}
