"""Meta-World's Sawyer arm: the motion of the hand and the fingers' effort, from its 39 numbers of state.

Read next: `arm.py`, which reads the columns; `envs/metaworld_env.py`, whose conventions these are.
"""

import dataclasses

from openpi_train.robots.arm import Arm

_HAND = ("hand_x_m", "hand_y_m", "hand_z_m", "opening_fraction")
_POSE = ("x_m", "y_m", "z_m", "quaternion_0", "quaternion_1", "quaternion_2", "quaternion_3")
_NOW = (*_HAND, *(f"object_{number}_{name}" for number in (1, 2) for name in _POSE))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetaWorld(Arm):
    """What `data collect metaworld` writes. Without pictures; give it `cameras` for those of the store.

    Objects that a task lacks are zeros. Motions are hundredths of a metre per control step, within -1..1.
    """

    # The store's arrays that make up the state.
    state_columns: tuple[str, ...] = ("state",)
    # The store's arrays that make up the action.
    action_columns: tuple[str, ...] = ("action",)

    @property
    def state_names(self) -> tuple[str, ...]:
        """Hand and objects now, the same one control step ago, and the goal."""
        return (*_NOW, *(f"before_{name}" for name in _NOW), "goal_x_m", "goal_y_m", "goal_z_m")

    @property
    def action_names(self) -> tuple[str, ...]:
        """Motion of the hand, and how hard the fingers close."""
        return ("delta_x_cm", "delta_y_cm", "delta_z_cm", "closing_effort")

    @property
    def control_hz(self) -> float:
        """Five of MuJoCo's steps of 0.0025 s."""
        return 80.0

    @property
    def delta_mask(self) -> None:
        """No dim: motions are relative already."""
        return None
