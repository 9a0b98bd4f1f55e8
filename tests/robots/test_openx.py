"""Open X-Embodiment's layouts against the numbers of their published readers, and the gripper's rules against loops."""

import numpy as np
import pytest

from openpi_train.robots.openx import OpenX, opening
from openpi_train.robots.openx_layouts import LAYOUTS

# Per layout: its columns' widths, 0 for numbers without an axis; the state [0] without the gripper; the state's gripper
# column and number, and what 1 in it is told as; the motion [0]; the command's column, and how it counts (below).
# Columns of observations hold 0, 1, 2 ... from 0 on, the next such column from 100 on; those of actions from 1000 on,
# the next from 1100 on: the numbers say where they come from. From Octo's and OpenVLA's transforms (octo-models/octo at
# 241fb35, data/oxe/oxe_standardization_transforms.py; openvla/openvla at c8f03f4, rlds/oxe/transforms.py and
# utils/droid_utils.py). They leave a measured gripper as it is; here one that says closed is told as open.
POSE_7 = {"observation/state": 7, "action": 7}
SPLIT = {"action/world_vector": 3, "action/rotation_delta": 3}
CLOSEDNESS = "action/gripper_closedness_action"
FIRST_6, WORLD = [1000, 1001, 1002, 1003, 1004, 1005], [1000, 1001, 1002, 1100, 1101, 1102]
EXTERNALLY = "_converted_externally_to_rlds"
FRANKA = ([0, 1, 2, 3, 4, 5, 6], ("observation/state", 7, 1), FIRST_6, ("action", "closed"))
PUBLISHED = {
    "fractal20220817_data": (
        {"observation/base_pose_tool_reached": 7, "observation/gripper_closed": 1, **SPLIT, CLOSEDNESS: 1},
        [0, 1, 2, 3, 4, 5, 6], ("observation/gripper_closed", 0, 0), WORLD, (CLOSEDNESS, "closing"),
    ),
    "bridge_dataset": (POSE_7, [0, 1, 2, 3, 4, 5], ("observation/state", 6, 1), FIRST_6, ("action", "moving")),
    "droid": (
        {"observation/cartesian_position": 6, "observation/gripper_position": 1, "action_dict/cartesian_velocity": 6,
         "action_dict/gripper_position": 1},
        [0, 1, 2, 3, 4, 5], ("observation/gripper_position", 0, 0), FIRST_6, ("action_dict/gripper_position", "closed"),
    ),
    "taco_play": (
        {"observation/robot_obs": 15, "action/rel_actions_world": 7},
        [0, 1, 2, 3, 4, 5], ("observation/robot_obs", 7, 1), FIRST_6, ("action/rel_actions_world", "open"),
    ),
    "jaco_play": (
        {"observation/end_effector_cartesian_pos": 7, "action/world_vector": 3, CLOSEDNESS: 1},
        [0, 1, 2, 3, 4, 5], ("observation/end_effector_cartesian_pos", 6, 1), [1000, 1001, 1002, 0, 0, 0],
        (CLOSEDNESS, "closing"),
    ),
    "berkeley_cable_routing": ({"observation/robot_state": 7, **SPLIT}, [0, 1, 2, 3, 4, 5, 6], None, WORLD, None),
    "viola": (
        {"observation/joint_states": 7, "observation/gripper_states": 1, **SPLIT, CLOSEDNESS: 0},
        [0, 1, 2, 3, 4, 5, 6], ("observation/gripper_states", 0, 1), WORLD, (CLOSEDNESS, "closed"),
    ),
    "berkeley_autolab_ur5": (
        {"observation/robot_state": 15, **SPLIT, CLOSEDNESS: 0},
        [6, 7, 8, 9, 10, 11, 12], ("observation/robot_state", 13, 0), WORLD, (CLOSEDNESS, "closing"),
    ),
    "toto": (
        {"observation/state": 7, **SPLIT, "action/open_gripper": 0},
        [0, 1, 2, 3, 4, 5, 6], None, WORLD, ("action/open_gripper", "open"),
    ),
    f"stanford_hydra_dataset{EXTERNALLY}": (
        {"observation/state": 27, "action": 7},
        [0, 1, 2, 7, 8, 9], ("observation/state", 24, 1), FIRST_6, ("action", "closed"),
    ),
    f"nyu_franka_play_dataset{EXTERNALLY}": (
        {"observation/state": 13, "action": 15},
        [7, 8, 9, 10, 11, 12], None, [1007, 1008, 1009, 1010, 1011, 1012], ("action", "open"),
    ),
    f"austin_buds_dataset{EXTERNALLY}": ({"observation/state": 24, "action": 7}, *FRANKA),
    f"austin_sailor_dataset{EXTERNALLY}": ({"observation/state": 8, "action": 7}, *FRANKA),
    f"austin_sirius_dataset{EXTERNALLY}": ({"observation/state": 8, "action": 7}, *FRANKA),
    "utaustin_mutex": ({"observation/state": 24, "action": 7}, *FRANKA),
    "bc_z": (
        {"observation/present/xyz": 3, "observation/present/axis_angle": 3, "observation/present/sensed_close": 1,
         "action/future/xyz_residual": 30, "action/future/axis_angle_residual": 30, "action/future/target_close": 10},
        [0, 1, 2, 100, 101, 102], ("observation/present/sensed_close", 0, 0), WORLD,
        ("action/future/target_close", "closed"),
    ),
    "berkeley_fanuc_manipulation": (
        {"observation/state": 13, "action": 6},
        [0, 1, 2, 3, 4, 5], ("observation/state", 6, 0), FIRST_6, ("observation/state", "closed"),
    ),
}  # fmt: skip
# Numbers of a command in one episode, and what they are as 0 closed .. 1 open: Octo's rel2abs_gripper_actions (1
# closes), binarize_gripper_actions, and clip_by_value with and without invert_gripper_actions.
COMMANDS = {
    "closing": ([0.05, 1.0, -0.1, -1.0], [1.0, 0.0, 0.0, 1.0]),
    "moving": ([0.97, 0.5, 0.02, 0.4], [1.0, 0.0, 0.0, 0.4]),
    "open": ([0.0, 1.0, 0.25, 2.0], [0.0, 1.0, 0.25, 1.0]),
    "closed": ([0.0, 1.0, 0.25, 2.0], [1.0, 0.0, 0.75, 0.0]),
}
# Which number of the command's column it is, where it is not the last.
COMMAND_AT = {"nyu_franka_play_dataset_converted_externally_to_rlds": 13, "bc_z": 0, "berkeley_fanuc_manipulation": 6}
# The images: the external camera and the hand's.
CAMERAS = {
    "fractal20220817_data": ("image", None),
    "bridge_dataset": ("image_0", None),
    "droid": ("exterior_image_1_left", "wrist_image_left"),
    "taco_play": ("rgb_static", "rgb_gripper"),
    "jaco_play": ("image", "image_wrist"),
    "berkeley_cable_routing": ("image", "wrist45_image"),
    "viola": ("agentview_rgb", "eye_in_hand_rgb"),
    "berkeley_autolab_ur5": ("image", "hand_image"),
    "toto": ("image", None),
    f"nyu_franka_play_dataset{EXTERNALLY}": ("image", None),
    "bc_z": ("image", None),
}


def columns_of(name: str) -> dict[str, np.ndarray]:
    """The columns of an episode of four steps, all rows alike: their numbers say where they stand."""
    made, counts = {}, {"observation": 0, "action": 0}
    for column, width in PUBLISHED[name][0].items():
        kind = "observation" if column.startswith("observation") else "action"
        if column == CLOSEDNESS or (column.endswith("gripper_position") and kind == "action"):
            row = np.zeros(width or ())
        else:
            row = np.arange(max(width, 1)) + 100.0 * counts[kind] + (1000 if kind == "action" else 0)
            counts[kind] += 1
            row = row if width else row[0]
        made[column] = np.tile(row, (4, *([1] * np.ndim(row)))).astype(np.float32)
    return made


def test_every_layout_is_tried():
    assert set(PUBLISHED) == set(LAYOUTS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_frame_is_read_as_its_published_reader_reads_it(name):
    _, pose, gripper, motion, command = PUBLISHED[name]
    robot, columns = OpenX(layout=name), columns_of(name)
    said, expected = COMMANDS[command[1]] if command else ([0.0] * 4, [0.0] * 4)
    if command:
        column = columns[command[0]].reshape(4, -1)
        column[:, COMMAND_AT.get(name, -1)] = said
    steps = robot.read(columns, np.array([4]))
    np.testing.assert_array_equal(steps.state[0, : len(pose)], pose)
    np.testing.assert_array_equal(steps.actions[0, :6], motion)
    np.testing.assert_allclose(steps.actions[:, 6], expected, atol=1e-7)
    assert steps.state.dtype == steps.actions.dtype == np.float32 and steps.use.all()
    assert steps.state.shape == (4, len(pose) + (gripper is not None)) and steps.actions.shape == (4, 7)
    if gripper is not None:
        for value in (0.0, 1.0):
            columns[gripper[0]].reshape(4, -1)[:, gripper[1]] = value
            assert (robot.read(columns, np.array([4])).state[:, -1] == (value if gripper[2] else 1 - value)).all()
    # Recorded motions are the model's targets, whatever the state is.
    np.testing.assert_array_equal(robot.to_model(steps.state[0], steps.actions)[1], steps.actions)
    base, wrist = CAMERAS.get(name, ("image", "wrist_image"))
    slots = {"base_0_rgb": base, "left_wrist_0_rgb": wrist}
    assert robot.cameras == {slot: f"observation/{image}" for slot, image in slots.items() if image}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_missing_column_is_named(name):
    columns = columns_of(name)
    missing = next(iter(columns))
    del columns[missing]
    with pytest.raises(ValueError, match=rf"{name} has the column '{missing}'; this dataset has"):
        OpenX(layout=name).read(columns, np.array([4]))


def held(commands):
    """Relative commands, one by one: +1 closes, -1 opens, 0 leaves it as it is."""
    first = next((command for command in commands if abs(command) > 0.1), 1)
    opened, result = 1 if first > 0.1 else 0, []
    for command in commands:
        opened = opened if abs(command) <= 0.1 else int(command < 0)
        result.append(opened)
    return result


def arrived(fractions):
    """From the end: a number between takes what comes after it."""
    carried, result = fractions[-1], []
    for fraction in reversed(fractions):
        carried = carried if 0.05 <= fraction <= 0.95 else float(fraction > 0.95)
        result.append(carried)
    return result[::-1]


@pytest.mark.parametrize(("says", "loop"), [("closing", held), ("moving", arrived)])
def test_grippers_follow_their_rule_episode_by_episode(says, loop):
    random = np.random.default_rng(1)
    values = {"closing": [-1.0, 0.0, 0.0, 0.0, 0.05, 1.0], "moving": [0.0, 0.02, 0.3, 0.6, 0.99, 1.0]}[says]
    for _ in range(30):
        recorded = random.choice(values, 14).astype(np.float32)
        ends = np.array([1, 6, 14])
        expected = np.concatenate([loop(part) for part in np.split(recorded, ends[:-1])])
        np.testing.assert_allclose(opening(recorded, ends, says), expected)
    assert opening(np.zeros(3), np.array([3]), "closing").tolist() == [1, 1, 1]


def test_open_and_closed_fractions_are_bounded():
    recorded = np.array([-1, 0.25, 2])
    assert opening(recorded, np.array([3]), "open").tolist() == [0, 0.25, 1]
    assert opening(recorded, np.array([3]), "closed").tolist() == [1, 0.75, 0]


def test_what_is_no_layout_or_has_other_widths_is_named():
    with pytest.raises(ValueError, match="no layout 'rt1'; there are austin_buds"):
        OpenX(layout="rt1")
    columns = columns_of("bridge_dataset")
    with pytest.raises(ValueError, match=r"bridge_dataset's pose has 6 numbers; this dataset's has 5"):
        OpenX(layout="bridge_dataset").read(
            {**columns, "observation/state": columns["observation/state"][:, :5]}, np.array([4])
        )
