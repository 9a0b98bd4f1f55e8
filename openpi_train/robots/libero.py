"""LIBERO's simulated Franka arm: end-effector pose and fingers, commanded by pose deltas. Read next: `arm.py`.

Features as in `physical-intelligence/libero` on the hub (LeRobot); LIBERO is Liu et al. 2023.
"""

import dataclasses
from collections.abc import Mapping

from openpi_train.robots.arm import Arm

_AXES = ("x", "y", "z")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Libero(Arm):
    """State of 8 dims: position, axis-angle rotation, both fingers. Actions of 7: a controller's deltas in [-1, 1]."""

    # The model's camera slot: the dataset's image feature.
    cameras: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: {"base_0_rgb": "image", "left_wrist_0_rgb": "wrist_image"}
    )
    # Features that make up the state, in order.
    state_columns: tuple[str, ...] = ("state",)
    # Features that make up the action, in order.
    action_columns: tuple[str, ...] = ("actions",)
    # Whether the state's pose is subtracted from the deltas: in openpi's `pi0_libero` it was, in `pi05_libero` not.
    extra_delta: bool = False

    control_hz = 10.0

    @property
    def state_names(self) -> tuple[str, ...]:
        position, rotation = (tuple(form.format(axis) for axis in _AXES) for form in ("{}_m", "axis_angle_{}_rad"))
        return (*position, *rotation, "left_finger_m", "right_finger_m")

    @property
    def action_names(self) -> tuple[str, ...]:
        """The controller's deltas, as fractions of its maximum step; -1 opens the gripper and 1 closes it."""
        forms = ("delta_{}_fraction", "delta_rotation_{}_fraction")
        return (*(form.format(axis) for form in forms for axis in _AXES), "gripper_closing_sign")

    @property
    def delta_mask(self) -> tuple[bool, ...] | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """None, or the pose dims with `extra_delta`."""
        return (True,) * 6 + (False,) if self.extra_delta else None
