"""Meta-World's Sawyer arm: 39 state dims; actions are the hand's motion and the fingers' effort.

Read next: `arm.py`, which reads the columns; `envs/metaworld_env.py`, whose conventions these are.
"""

import dataclasses

from openpi_train.robots.arm import Arm

_HAND = ("hand_x_m", "hand_y_m", "hand_z_m", "opening_fraction")
_POSE = ("x_m", "y_m", "z_m", "quaternion_0", "quaternion_1", "quaternion_2", "quaternion_3")
_NOW = (*_HAND, *(f"object_{number}_{name}" for number in (1, 2) for name in _POSE))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetaWorld(Arm):
    """The data that `data collect metaworld` writes. No cameras by default; set `cameras` to use the store's pictures.

    Absent objects are zeros. Motions are in hundredths of a metre per control step, within -1..1.
    """

    # The store's arrays that make up the state.
    state_columns: tuple[str, ...] = ("state",)
    # The store's arrays that make up the action.
    action_columns: tuple[str, ...] = ("action",)

    control_hz = 80.0  # a control step is five MuJoCo steps of 0.0025 s
    delta_mask = None  # motions are already relative

    @property
    def state_names(self) -> tuple[str, ...]:
        """Hand and objects now and one control step ago, and the goal."""
        return (*_NOW, *(f"before_{name}" for name in _NOW), "goal_x_m", "goal_y_m", "goal_z_m")

    @property
    def action_names(self) -> tuple[str, ...]:
        return ("delta_x_cm", "delta_y_cm", "delta_z_cm", "closing_effort")
