"""Arms of Open X-Embodiment and DROID, converted to one action convention: end-effector motion and gripper.

Read next: `openx_layouts.py`, one entry per dataset; `data/formats/rlds/rlds_source.py`, which opens them.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from openpi_train.robots.openx_layouts import LAYOUTS, GripperAction, Layout, Part
from openpi_train.robots.robot import Robot, Steps

_AXES = ("x", "y", "z")
_POSITION = tuple(f"{axis}_m" for axis in _AXES)
_POSES = {
    "euler": (*_POSITION, "roll_rad", "pitch_rad", "yaw_rad"),
    "axis_angle": (*_POSITION, *(f"axis_angle_{axis}_rad" for axis in _AXES)),
    "quaternion": (*_POSITION, *(f"quaternion_{part}" for part in ("x", "y", "z", "w"))),
    "joints_6": tuple(f"joint_{number}_rad" for number in range(1, 7)),
    "joints_7": tuple(f"joint_{number}_rad" for number in range(1, 8)),
}
# Units are the dataset's: metres and radians in some, fractions of a controller's maximum step in others.
_MOTION = (*(f"delta_{axis}" for axis in _AXES), "delta_roll", "delta_pitch", "delta_yaw")
# Relative commands below the first count as none; a moving gripper within the second of 0 or 1 has arrived.
_SMALLEST_COMMAND, _ARRIVED = 0.1, 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenX(Robot):
    """A robot of `openx_layouts.LAYOUTS`: actions of 7 dims, recorded motion and gripper command (0 closed .. 1 open).

    The state is the pose in the dataset's representation, and the gripper if recorded. Datasets differ in dims and
    units, so each has its own norm stats.
    """

    # The dataset's name, as in Open X-Embodiment.
    layout: str = "fractal20220817_data"
    # The model's camera slot: the dataset's image feature; by default the layout's.
    cameras: Mapping[str, str] = dataclasses.field(default_factory=dict)

    delta_mask = None  # the recorded actions are already deltas
    skip_unlabeled = True  # as Octo and OpenVLA

    def __post_init__(self):
        if self.layout not in LAYOUTS:
            raise ValueError(f"no layout {self.layout!r}; there are {', '.join(sorted(LAYOUTS))}")
        if not self.cameras:
            slots = {"base_0_rgb": self._layout.base, "left_wrist_0_rgb": self._layout.wrist}
            object.__setattr__(self, "cameras", {slot: camera for slot, camera in slots.items() if camera})

    @property
    def state_names(self) -> tuple[str, ...]:
        """The pose, and the gripper if there is one: 0 closed .. 1 open, or as recorded."""
        if self._layout.gripper is None:
            return _POSES[self._layout.form]
        return (*_POSES[self._layout.form], f"gripper_{'fraction' if self._is_closing else 'recorded'}")

    @property
    def action_names(self) -> tuple[str, ...]:
        return (*_MOTION, "gripper_fraction")

    @property
    def control_hz(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The dataset's rate."""
        return self._layout.control_hz

    def read(self, columns: Mapping[str, np.ndarray], episode_ends: np.ndarray) -> Steps:
        """States and actions in the common convention; every step may start a window."""
        layout, ends = self._layout, np.asarray(episode_ends)
        state = [self._part(columns, part) for part in layout.pose]
        self._check(sum(part.shape[1] for part in state), len(_POSES[layout.form]), "pose")
        if layout.gripper is not None:
            gripper = self._part(columns, layout.gripper)[:, :1]
            state.append(1 - gripper if self._is_closing else gripper)
        motion = np.concatenate([self._part(columns, part) for part in layout.motion], axis=1)
        actions = np.zeros((len(motion), len(self.action_names)), np.float32)
        if motion.shape[1] != 3:  # an arm that only moves
            self._check(motion.shape[1], len(_MOTION), "motion")
        actions[:, : motion.shape[1]] = motion
        if layout.command is not None:
            actions[:, -1] = opening(self._part(columns, layout.command)[:, 0], ends, layout.command_says)
        return Steps(state=np.concatenate(state, axis=1), actions=actions, use=np.ones(len(actions), bool))

    @property
    def _layout(self) -> Layout:
        return LAYOUTS[self.layout]

    @property
    def _is_closing(self) -> bool:
        return self._layout.gripper_says == "closed"

    def _part(self, columns: Mapping[str, np.ndarray], part: Part) -> np.ndarray:
        if part.column not in columns:
            raise ValueError(
                f"{self.layout} has the column {part.column!r}; this dataset has {', '.join(sorted(columns))}: "
                "another --data.datasets.N.robot.layout?"
            )
        column = np.asarray(columns[part.column], np.float32)
        return column.reshape(len(column), -1)[:, part.first : part.end]

    def _check(self, found: int, wanted: int, what: str) -> None:
        if found != wanted:
            raise ValueError(
                f"{self.layout}'s {what} has {wanted} numbers; this dataset's has {found}: another "
                "--data.datasets.N.robot.layout?"
            )


def opening(recorded: np.ndarray, episode_ends: np.ndarray, says: GripperAction) -> np.ndarray:
    """Gripper actions [n] as 0 closed .. 1 open.

    Relative commands ("close" or "open") hold until the next one; before an episode's first one the gripper is in the
    opposite state, or open if there is none. A moving gripper has the value at which it arrives; if the episode ends
    before that, its last value. As in Octo (`data/utils/data_utils.py`: rel2abs_gripper_actions,
    binarize_gripper_actions).
    """
    if says in ("open", "closed"):
        fraction = np.clip(recorded, 0, 1)
        return fraction if says == "open" else 1 - fraction
    result = np.empty(len(recorded), np.float32)
    for first, end in zip([0, *episode_ends[:-1].tolist()], episode_ends.tolist(), strict=True):
        part = recorded[first:end]
        result[first:end] = _held(part) if says == "closing" else _arrived(part)
    return result


def _held(commands: np.ndarray) -> np.ndarray:
    said = np.where(commands > _SMALLEST_COMMAND, 0.0, np.where(commands < -_SMALLEST_COMMAND, 1.0, np.nan))
    given = np.flatnonzero(~np.isnan(said))
    before = 1 - said[given[0]] if len(given) else 1.0
    last = np.maximum.accumulate(np.where(np.isnan(said), -1, np.arange(len(said))))
    return np.where(last < 0, before, said[last])


def _arrived(fractions: np.ndarray) -> np.ndarray:
    settled = np.where(fractions > 1 - _ARRIVED, 1.0, np.where(fractions < _ARRIVED, 0.0, np.nan))
    places = np.where(np.isnan(settled), len(settled), np.arange(len(settled)))
    following = np.minimum.accumulate(places[::-1])[::-1]
    return np.append(settled, fractions[-1])[following]
