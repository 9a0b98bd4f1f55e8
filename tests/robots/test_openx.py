"""Open X-Embodiment's layouts: one convention out of each, and the gripper's rules against loops that say them."""

import numpy as np
import pytest

from openpi_train.robots.openx import OpenX, opening
from openpi_train.robots.openx_layouts import LAYOUTS

# Widths of the columns, as the datasets' features have them.
WIDTHS = {
    "fractal20220817_data": {"observation/base_pose_tool_reached": 7, "observation/gripper_closed": 1},
    "bridge_dataset": {"observation/state": 7, "action": 7},
    "droid": {
        "observation/cartesian_position": 6,
        "observation/gripper_position": 1,
        "action_dict/cartesian_velocity": 6,
        "action_dict/gripper_position": 1,
    },
    "taco_play": {"observation/robot_obs": 15, "action/rel_actions_world": 7},
    "jaco_play": {"observation/end_effector_cartesian_pos": 7},
    "berkeley_cable_routing": {"observation/robot_state": 7},
    "viola": {"observation/joint_states": 7, "observation/gripper_states": 1},
    "berkeley_autolab_ur5": {"observation/robot_state": 15},
    "toto": {"observation/state": 7, "action/open_gripper": 0},
    "stanford_hydra_dataset_converted_externally_to_rlds": {"observation/state": 27, "action": 7},
    "nyu_franka_play_dataset_converted_externally_to_rlds": {"observation/state": 13, "action": 15},
    "austin_buds_dataset_converted_externally_to_rlds": {"observation/state": 24, "action": 7},
    "austin_sailor_dataset_converted_externally_to_rlds": {"observation/state": 8, "action": 7},
    "austin_sirius_dataset_converted_externally_to_rlds": {"observation/state": 8, "action": 7},
    "utaustin_mutex": {"observation/state": 24, "action": 7},
    "bc_z": {
        "observation/present/xyz": 3,
        "observation/present/axis_angle": 3,
        "observation/present/sensed_close": 1,
        "action/future/xyz_residual": 30,
        "action/future/axis_angle_residual": 30,
        "action/future/target_close": 10,
    },
    "berkeley_fanuc_manipulation": {"observation/state": 13, "action": 6},
}
SPLIT_ACTIONS = {"action/world_vector": 3, "action/rotation_delta": 3, "action/gripper_closedness_action": 1}
ENDS = np.array([4, 9])


def columns_of(name: str) -> dict[str, np.ndarray]:
    """Random columns of a layout, its gripper's command among the values that the dataset has."""
    random = np.random.default_rng(0)
    widths = WIDTHS[name]
    if not any("action" in column and "open_gripper" not in column for column in widths):
        widths = {**widths, **SPLIT_ACTIONS}
    shapes = {column: (9, width) if width else (9,) for column, width in widths.items()}
    return {column: random.uniform(-1, 1, shape).astype(np.float32) for column, shape in shapes.items()}


def test_every_layout_is_tried():
    assert set(WIDTHS) == set(LAYOUTS)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_reads_into_the_one_convention(name):
    robot, columns, layout = OpenX(layout=name), columns_of(name), LAYOUTS[name]
    steps = robot.read(columns, ENDS)
    assert steps.state.shape == (9, len(robot.state_names)) and steps.actions.shape == (9, 7)
    assert steps.state.dtype == steps.actions.dtype == np.float32 and steps.use.all()
    first = columns[layout.motion[0].column].reshape(9, -1)[:, layout.motion[0].first :]
    np.testing.assert_array_equal(steps.actions[:, :3], first[:, :3])
    assert steps.actions[:, 6].min() >= 0 and steps.actions[:, 6].max() <= 1
    assert set(robot.cameras.values()) == {camera for camera in (layout.base, layout.wrist) if camera}
    missing = dict(columns)
    missing.pop(layout.pose[0].column)
    with pytest.raises(ValueError, match=rf"{name} has the column '{layout.pose[0].column}'; this dataset has"):
        robot.read(missing, ENDS)


@pytest.mark.parametrize("name", ["droid", "fractal20220817_data", "bc_z"])
def test_a_gripper_that_is_recorded_closed_is_told_open(name):
    layout = LAYOUTS[name]
    columns = columns_of(name)
    assert layout.command is not None and layout.gripper is not None
    columns[layout.command.column][:] = columns[layout.gripper.column][:] = 1
    steps = OpenX(layout=name).read(columns, ENDS)
    assert (steps.actions[:, 6] == 0).all() and (steps.state[:, -1] == 0).all()


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
        OpenX(layout="bridge_dataset").read({**columns, "observation/state": columns["observation/state"][:, :5]}, ENDS)
