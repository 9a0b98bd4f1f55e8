"""Layouts of the RLDS releases of Open X-Embodiment's datasets and DROID, one entry each.

Read next: `openx.py`, which uses them. Columns, their parts and the meaning of gripper values are taken from Octo's
standardisation (octo-models/octo at 4813bbe, `octo/data/oxe`: the transforms and configs; DROID's from
openvla/openvla, `prismatic/vla/datasets/rlds/oxe/utils/droid_utils.py`); rates from
thu-ml/RoboticsDiffusionTransformer at b9baaae, `configs/dataset_control_freq.json`.
"""

import dataclasses
from typing import Literal

# Meaning of a recorded gripper action: 1 open and 0 closed; 1 closed and 0 open; above 0 close, below 0 open, 0 no
# change; or 1 open and 0 closed, with values between while the fingers move.
GripperAction = Literal["open", "closed", "closing", "moving"]
# Meaning of a measured gripper: as recorded, or 1 closed and 0 open.
GripperState = Literal["recorded", "closed"]
PoseForm = Literal["euler", "axis_angle", "quaternion", "joints_6", "joints_7"]


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a column: the slice from `first` to `end`."""

    column: str
    first: int = 0
    end: int | None = None


@dataclasses.dataclass(frozen=True)
class Layout:
    """A dataset's conventions.

    Attributes:
        base: The external camera, if there is one; `wrist` the one on the hand.
        pose: The parts of the state's pose, represented as `form`; `gripper` is the part of its gripper.
        motion: The parts of an action's translation and rotation; rotations that a dataset lacks are 0.
        command: The part of an action's gripper; None: the robot has no gripper, and the value is 0.
    """

    control_hz: float
    base: str | None
    wrist: str | None
    pose: tuple[Part, ...]
    form: PoseForm
    gripper: Part | None
    motion: tuple[Part, ...]
    command: Part | None
    command_says: GripperAction = "open"
    gripper_says: GripperState = "recorded"


_STATE, _ACTION = "observation/state", "action"
_GRIPPER = "action/gripper_closedness_action"
_WORLD = (Part("action/world_vector"), Part("action/rotation_delta"))
_FIRST_6, _LAST = (Part(_ACTION, 0, 6),), Part(_ACTION, -1)
_EXTERNALLY = "_converted_externally_to_rlds"


def _image(name: str) -> str:
    return f"observation/{name}"


def _franka(form: PoseForm, hz: float = 20.0) -> Layout:
    """The layout that several Austin datasets share: the state begins with 7 pose dims and the gripper; 1 closes it."""
    cameras = _image("image"), _image("wrist_image")
    return Layout(hz, *cameras, (Part(_STATE, 0, 7),), form, Part(_STATE, 7, 8), _FIRST_6, _LAST, "closed")


LAYOUTS = {
    "fractal20220817_data": Layout(
        3.0, _image("image"), None, (Part("observation/base_pose_tool_reached"),), "quaternion",
        Part("observation/gripper_closed"), _WORLD, Part(_GRIPPER), "closing", "closed",
    ),
    # Berkeley's own release, not the copy in Open X-Embodiment. `Bridge` also supports the poses reached.
    "bridge_dataset": Layout(
        5.0, _image("image_0"), None, (Part(_STATE, 0, 6),), "euler", Part(_STATE, -1), _FIRST_6, _LAST, "moving",
    ),
    "droid": Layout(
        15.0, _image("exterior_image_1_left"), _image("wrist_image_left"), (Part("observation/cartesian_position"),),
        "euler", Part("observation/gripper_position"), (Part("action_dict/cartesian_velocity"),),
        Part("action_dict/gripper_position"), "closed", "closed",
    ),
    "taco_play": Layout(
        15.0, _image("rgb_static"), _image("rgb_gripper"), (Part("observation/robot_obs", 0, 6),), "euler",
        Part("observation/robot_obs", 7, 8), (Part("action/rel_actions_world", 0, 6),),
        Part("action/rel_actions_world", -1), "open",
    ),
    "jaco_play": Layout(
        10.0, _image("image"), _image("image_wrist"), (Part("observation/end_effector_cartesian_pos", 0, 6),), "euler",
        Part("observation/end_effector_cartesian_pos", -1), _WORLD[:1], Part(_GRIPPER), "closing",
    ),
    "berkeley_cable_routing": Layout(
        10.0, _image("image"), _image("wrist45_image"), (Part("observation/robot_state"),), "joints_7", None, _WORLD,
        None,
    ),
    "viola": Layout(
        20.0, _image("agentview_rgb"), _image("eye_in_hand_rgb"), (Part("observation/joint_states"),), "joints_7",
        Part("observation/gripper_states"), _WORLD, Part(_GRIPPER), "closed",
    ),
    "berkeley_autolab_ur5": Layout(
        5.0, _image("image"), _image("hand_image"), (Part("observation/robot_state", 6, 13),), "quaternion",
        Part("observation/robot_state", 13, 14), _WORLD, Part(_GRIPPER), "closing", "closed",
    ),
    "toto": Layout(
        30.0, _image("image"), None, (Part(_STATE),), "joints_7", None, _WORLD, Part("action/open_gripper"),
    ),
    f"stanford_hydra_dataset{_EXTERNALLY}": Layout(
        10.0, _image("image"), _image("wrist_image"), (Part(_STATE, 0, 3), Part(_STATE, 7, 10)), "euler",
        Part(_STATE, -3, -2), _FIRST_6, _LAST, "closed",
    ),
    f"nyu_franka_play_dataset{_EXTERNALLY}": Layout(
        3.0, _image("image"), None, (Part(_STATE, -6),), "euler", None, (Part(_ACTION, -8, -2),), Part(_ACTION, -2, -1),
    ),
    f"austin_buds_dataset{_EXTERNALLY}": _franka("joints_7"),
    f"austin_sailor_dataset{_EXTERNALLY}": _franka("quaternion"),
    f"austin_sirius_dataset{_EXTERNALLY}": _franka("quaternion"),
    "utaustin_mutex": _franka("joints_7"),
    "bc_z": Layout(
        10.0, _image("image"), None, (Part("observation/present/xyz"), Part("observation/present/axis_angle")),
        "axis_angle", Part("observation/present/sensed_close"),
        (Part("action/future/xyz_residual", 0, 3), Part("action/future/axis_angle_residual", 0, 3)),
        Part("action/future/target_close", 0, 1), "closed", "closed",
    ),
    # Records no gripper command: the measured gripper is used instead.
    "berkeley_fanuc_manipulation": Layout(
        10.0, _image("image"), _image("wrist_image"), (Part(_STATE, 0, 6),), "joints_6", Part(_STATE, 6, 7),
        (Part(_ACTION),), Part(_STATE, 6, 7), "closed", "closed",
    ),
}  # fmt: skip
