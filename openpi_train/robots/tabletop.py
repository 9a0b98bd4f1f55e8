"""The gripper of the embedded tabletop environment, with end-effector deltas as in its datasets.

Read next: `arm.py`, which reads the columns; `bridge.py` for a real arm of the same layout.
"""

import dataclasses
from collections.abc import Mapping

from openpi_train.robots.arm import Arm

_POSE = ("x_m", "y_m", "z_m", "roll_rad", "pitch_rad", "yaw_rad")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tabletop(Arm):
    """Pose and gripper as state, bounded pose deltas and a gripper command as action, 7 dims each.

    The gripper is 0 closed .. 1 open: measured in the state, commanded in the action. The defaults fit `data prepare`'s
    RLDS dataset; a zarr store of `data collect` has `state`, `image_0` and `image_1`.
    """

    # The model's camera slot: the dataset's image feature.
    cameras: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: {"base_0_rgb": "observation/image_0", "left_wrist_0_rgb": "observation/image_1"}
    )

    control_hz = 5.0
    delta_mask = None  # the recorded actions are already deltas

    @property
    def state_names(self) -> tuple[str, ...]:
        return (*_POSE, "gripper_fraction")

    @property
    def action_names(self) -> tuple[str, ...]:
        """Change of the pose in one control step, gripper command."""
        return (*(f"delta_{name}" for name in _POSE), "gripper_fraction")
