"""WidowX arms as in BridgeData V2: end-effector pose and gripper, one arm or two.

Each arm has 7 dims: position (m), Euler angles (rad), gripper (0 closed .. 1 open). Actions are either the dataset's
own per-step pose deltas, or (`trajectory`) the poses that the arm reached, relative for the model to the pose at
the chunk's start. Read next: `data/robot/windows.py`, the caller.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from openpi_train.robots.robot import Robot, Steps

_POSE = ("x_m", "y_m", "z_m", "roll_rad", "pitch_rad", "yaw_rad")
_ARM_DIMS = len(_POSE) + 1
_NULL_ACTION = 1e-5  # In the sample, null actions stay below 8e-7; the largest pose dim of others is above 1e-4.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bridge(Robot):
    """BridgeData V2's conventions.

    `num_arms` 2 is the dual-arm layout (14 dims, first arm first); a dataset of one arm fills the first and leaves
    zeros for the second. `trajectory` uses the pose of the next step as action (the gripper is still the commanded
    one); an episode's last step has no next one, so its action is its own pose.
    """

    # The model's camera slot: the dataset's image feature.
    cameras: Mapping[str, str] = dataclasses.field(default_factory=lambda: {"base_0_rgb": "observation/image_0"})
    # Arms in the layout, 7 dims each.
    num_arms: int = 1
    # Predict the poses reached, relative to the present one, instead of the recorded deltas.
    trajectory: bool = False
    # The dataset's state feature.
    state_column: str = "observation/state"
    # The dataset's action feature.
    action_column: str = "action"

    control_hz = 5.0
    skip_unlabeled = True  # as Octo and OpenVLA

    def __post_init__(self):
        if self.num_arms not in (1, 2):
            raise ValueError(f"num_arms {self.num_arms} is not 1 or 2")

    @property
    def state_names(self) -> tuple[str, ...]:
        """Pose and gripper of each arm."""
        return self._names("")

    @property
    def action_names(self) -> tuple[str, ...]:
        """The state's names, with the prefix `delta_` if actions are per-step pose deltas."""
        return self._names("" if self.trajectory else "delta_")

    @property
    def delta_mask(self) -> tuple[bool, ...] | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Every pose dim with `trajectory`; otherwise None, as the actions are already deltas."""
        return ((True,) * len(_POSE) + (False,)) * self.num_arms if self.trajectory else None

    @property
    def whole_columns(self) -> tuple[str, str]:
        return self.state_column, self.action_column

    def read(self, columns: Mapping[str, np.ndarray], episode_ends: np.ndarray) -> Steps:
        """States and actions; windows must not start at null first actions."""
        state, recorded = (self._of_arms(columns, name) for name in (self.state_column, self.action_column))
        first = np.concatenate([[0], np.asarray(episode_ends, np.int64)[:-1]])
        is_pose = np.arange(recorded.shape[1]) % _ARM_DIMS != len(_POSE)
        use = np.ones(len(state), bool)
        use[first] = np.any(np.abs(recorded[first][:, is_pose]) >= _NULL_ACTION, axis=-1)
        actions = recorded
        if self.trajectory:
            following = np.minimum(np.arange(len(state)) + 1, len(state) - 1)
            following[np.asarray(episode_ends, np.int64) - 1] -= np.asarray(episode_ends) < len(state)
            actions = np.where(is_pose, state[following], recorded)
        return Steps(state=self._padded(state), actions=self._padded(actions), use=use)

    def to_model(self, state: np.ndarray, actions: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray | None]:
        """As `Robot.to_model`, with relative angles wrapped to [-pi, pi), so a yaw that passes pi is a small motion."""
        state, actions = super().to_model(state, actions)
        if actions is None or not self.trajectory:
            return state, actions
        is_angle = np.array([name.endswith("_rad") for name in self.action_names])
        return state, np.where(is_angle, (actions + np.pi) % (2 * np.pi) - np.pi, actions).astype(actions.dtype)

    def _names(self, prefix: str) -> tuple[str, ...]:
        arm = (*(prefix + name for name in _POSE), "gripper_fraction")
        if self.num_arms == 1:
            return arm
        return tuple(f"{side}_{name}" for side in ("first", "second") for name in arm)

    def _of_arms(self, columns: Mapping[str, np.ndarray], name: str) -> np.ndarray:
        column = self._column(columns, name)
        allowed = [_ARM_DIMS * arms for arms in range(1, self.num_arms + 1)]
        if column.ndim != 2 or column.shape[1] not in allowed:
            raise ValueError(
                f"column {name!r} has shape {list(column.shape[1:])} per step; a Bridge robot with num_arms "
                f"{self.num_arms} reads {' or '.join(map(str, allowed))} dims"
            )
        return column

    def _padded(self, values: np.ndarray) -> np.ndarray:
        missing = self.num_arms * _ARM_DIMS - values.shape[1]
        return np.pad(values, ((0, 0), (0, missing))).astype(np.float32, copy=False)
