"""ALOHA's two ViperX arms, real or simulated, with joint positions. Read next: `arm.py`.

pi0's base model was trained in other units: three joints have the opposite sign, and grippers are motor angles, not
finger openings. `adapt_to_pi` converts between the two, with openpi's constants (Physical-Intelligence/
openpi at 15a9616, `policies/aloha_policy.py`), which are Interbotix's and ALOHA's; `tests/golden` holds its numbers.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from openpi_train.robots.arm import Arm

_ARM = ("waist_rad", "shoulder_rad", "elbow_rad", "forearm_roll_rad", "wrist_angle_rad", "wrist_rotate_rad")
_GRIPPERS = (6, 13)
_FLIPPED = np.array([1, -1, -1, 1, 1, 1, 1] * 2)
# The fingers' distance from the motor's axis at 0 and 1, and the dimensions of the linkage, in metres.
_FINGER_M = (0.01844, 0.05800)
_ROD_M, _HORN_M = 0.036, 0.022
# The motor angles at 0 and 1: in pi0's states, and in ALOHA's commands.
_PI_RAD = (0.5476, 1.6296)
_COMMAND_RAD = (-0.6213, 1.4910)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Aloha(Arm):
    """Two arms of six joints and a gripper, left arm first; the state's gripper is 0 closed .. 1 open."""

    # The model's camera slot: the dataset's image feature.
    cameras: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: {
            "base_0_rgb": "observation/images/cam_high",
            "left_wrist_0_rgb": "observation/images/cam_left_wrist",
            "right_wrist_0_rgb": "observation/images/cam_right_wrist",
        }
    )
    # Convert to the units of pi0's base model; policies of the simulated robot are trained without it.
    adapt_to_pi: bool = True
    # Whether the model sees joint targets relative to the joints at the chunk's start.
    relative: bool = True

    control_hz = 50.0

    @property
    def state_names(self) -> tuple[str, ...]:
        return tuple(f"{side}_{name}" for side in ("left", "right") for name in (*_ARM, "gripper_fraction"))

    @property
    def action_names(self) -> tuple[str, ...]:
        return self.state_names

    @property
    def delta_mask(self) -> tuple[bool, ...] | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """All joints except the grippers, or None."""
        return ((True,) * 6 + (False,)) * 2 if self.relative else None

    def to_model(self, state: np.ndarray, actions: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray | None]:
        """As `Robot.to_model`, in pi0's units with `adapt_to_pi`."""
        if self.adapt_to_pi:
            state = _converted(state, _finger_to_pi)
            actions = None if actions is None else _converted(actions, _command_to_pi)
        return super().to_model(state, actions)

    def from_model(self, actions: np.ndarray, state: np.ndarray) -> np.ndarray:
        """As `Robot.from_model`, from pi0's units with `adapt_to_pi`."""
        if not self.adapt_to_pi:
            return super().from_model(actions, state)
        return _converted(super().from_model(actions, _converted(state, _finger_to_pi)), _pi_to_command)


def _converted(values, gripper):
    """Joints in the other sign convention (its own inverse), and grippers converted by `gripper`."""
    values = values * _FLIPPED.astype(values.dtype)
    values[..., _GRIPPERS] = gripper(values[..., _GRIPPERS])
    return values


def _finger_to_pi(opening):
    """Finger opening 0..1 -> motor angle as a fraction of `_PI_RAD`, by the distribution of cosines for the linkage."""
    distance = _between(opening, _FINGER_M)
    sine = (_HORN_M**2 + distance**2 - _ROD_M**2) / (2 * _HORN_M * distance)
    return _fraction(np.arcsin(np.clip(sine, -1.0, 1.0)), _PI_RAD)


def _command_to_pi(command):
    """A command 0..1 -> radians above the angle at which pi0's states are 0."""
    return _between(command, _COMMAND_RAD) - _PI_RAD[0]


def _pi_to_command(angle):
    return _fraction(angle + _PI_RAD[0], _COMMAND_RAD)


def _between(fraction, ends):
    return ends[0] + fraction * (ends[1] - ends[0])


def _fraction(value, ends):
    return (value - ends[0]) / (ends[1] - ends[0])
