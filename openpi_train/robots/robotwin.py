"""RoboTwin's two arms as in its diffusion-policy stores: joints of both arms, or an end-effector pose.

Read next: `arm.py`, which reads the columns; `data/formats/zarr/zarr_source.py`, which opens the stores.
"""

import dataclasses
from collections.abc import Mapping

from openpi_train.robots.arm import Arm

_SIDES = ("left", "right")
_ROTATION = tuple(f"rotation_{number}" for number in range(6))


def _joints(per_arm: int) -> tuple[str, ...]:
    arm = (*(f"joint_{number}_rad" for number in range(per_arm)), "gripper_fraction")
    return tuple(f"{side}_{name}" for side in _SIDES for name in arm)


# Names of the dims of a state or action: six or seven joints and a gripper per arm, left first; or the position, two
# columns of the rotation matrix and the gripper of one end effector.
_LAYOUTS = {10: ("x_m", "y_m", "z_m", *_ROTATION, "gripper_fraction"), 14: _joints(6), 16: _joints(7)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoboTwin(Arm):
    """Absolute targets of all joints: an action is the state of the next step, as in the stores."""

    # The model's camera slot: the store's pictures.
    cameras: Mapping[str, str] = dataclasses.field(default_factory=lambda: {"head_camera": "head_camera"})
    # 14 or 16 for two arms of six or seven joints, 10 for an end-effector pose.
    dims: int = 14
    # The store's arrays that make up the state.
    state_columns: tuple[str, ...] = ("state",)
    # The store's arrays that make up the action.
    action_columns: tuple[str, ...] = ("action",)

    control_hz = 250 / 15  # RoboTwin saves every 15th of its 250 physics steps per second (`save_freq: 15`)
    delta_mask = None  # targets are absolute
    actions_are_next_states = True

    def __post_init__(self):
        if self.dims not in _LAYOUTS:
            raise ValueError(f"dims {self.dims} is not one of {', '.join(map(str, _LAYOUTS))}")

    @property
    def state_names(self) -> tuple[str, ...]:
        return _LAYOUTS[self.dims]

    @property
    def action_names(self) -> tuple[str, ...]:
        return _LAYOUTS[self.dims]
