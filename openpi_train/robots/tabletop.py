"""The embedded tabletop environment's gripper: end-effector deltas, as its dataset records and its steps take them.

Read next: `data/windows.py`, the caller; `bridge.py` for a real arm of the same layout.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from openpi_train.robots.base import Robot, Steps

_POSE = ("x_m", "y_m", "z_m", "roll_rad", "pitch_rad", "yaw_rad")
STATE_COLUMN = "observation/state"
ACTION_COLUMN = "action"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tabletop(Robot):
    """Pose and gripper as state, bounded pose deltas and a gripper command as action, 7 dims each.

    The gripper is 0 closed .. 1 open, in the state measured, in the action commanded.
    """

    # The model's camera slot: the dataset's image feature.
    cameras: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: {"base_0_rgb": "observation/image_0", "left_wrist_0_rgb": "observation/image_1"}
    )

    @property
    def state_names(self) -> tuple[str, ...]:
        """Fingertip position, Euler angles, gripper opening."""
        return (*_POSE, "gripper_fraction")

    @property
    def action_names(self) -> tuple[str, ...]:
        """Change of the pose in one control step, gripper command."""
        return (*(f"delta_{name}" for name in _POSE), "gripper_fraction")

    @property
    def control_hz(self) -> float:
        """The environment's control rate."""
        return 5.0

    @property
    def delta_mask(self) -> None:
        """No dim: the recorded actions are deltas already."""
        return None

    def read(self, columns: Mapping[str, np.ndarray], episode_ends: np.ndarray) -> Steps:
        """States and actions as recorded; every step may start a window."""
        del episode_ends
        state, actions = _column(columns, STATE_COLUMN), _column(columns, ACTION_COLUMN)
        return Steps(state=state, actions=actions, use=np.ones(len(state), bool))


def _column(columns: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    if name not in columns:
        raise ValueError(f"the Tabletop robot reads the column {name!r}; the dataset has {', '.join(sorted(columns))}")
    column = np.asarray(columns[name], np.float32)
    if column.ndim != 2 or column.shape[1] != len(_POSE) + 1:
        raise ValueError(
            f"column {name!r} has shape {list(column.shape[1:])} per step; the Tabletop robot reads 7 dims"
        )
    return column
