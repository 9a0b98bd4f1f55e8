"""DROID's Franka arm: joint angles and gripper, commanded by joint velocities or positions. Read next: `arm.py`.

Features as in the RLDS release (droid 1.0.1); the dataset is described in Khazatsky et al. 2024.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import numpy as np

from openpi_train.robots.arm import Arm
from openpi_train.robots.robot import Steps

_JOINTS = range(1, 8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Droid(Arm):
    """Seven joints and a gripper, 0 open .. 1 closed."""

    # The model's camera slot: the dataset's image feature.
    cameras: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: {
            "base_0_rgb": "observation/exterior_image_1_left",
            "left_wrist_0_rgb": "observation/wrist_image_left",
        }
    )
    # Features that make up the state, in order.
    state_columns: tuple[str, ...] = ("observation/joint_position", "observation/gripper_position")
    # Features that make up the action, in order; `{action}` is the field of that name.
    action_columns: tuple[str, ...] = ("action_dict/{action}", "action_dict/gripper_position")
    # The commands: velocities as recorded, or positions, which the model sees relative to the chunk's start.
    action: Literal["joint_velocity", "joint_position"] = "joint_velocity"

    control_hz = 15.0
    skip_unlabeled = True  # as Octo and OpenVLA

    def read(self, columns: Mapping[str, np.ndarray], episode_ends: np.ndarray) -> Steps:
        names = tuple(name.format(action=self.action) for name in self.action_columns)
        return super(Droid, dataclasses.replace(self, action_columns=names)).read(columns, episode_ends)

    @property
    def state_names(self) -> tuple[str, ...]:
        return (*(f"joint_{number}_rad" for number in _JOINTS), "gripper_closed_fraction")

    @property
    def action_names(self) -> tuple[str, ...]:
        unit = "rad_per_s" if self.action == "joint_velocity" else "rad"
        return (*(f"joint_{number}_{unit}" for number in _JOINTS), "gripper_closed_fraction")

    @property
    def delta_mask(self) -> tuple[bool, ...] | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """All joints if positions are commanded; None for velocities."""
        return (True,) * 7 + (False,) if self.action == "joint_position" else None
