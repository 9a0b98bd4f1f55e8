"""Robots that are read column by column: names, both directions, and what is said where the data do not fit."""

import json

import numpy as np
import pytest

from openpi_train.robots.aloha import Aloha
from openpi_train.robots.droid import Droid
from openpi_train.robots.libero import Libero
from openpi_train.robots.ur5 import UR5

ROBOTS = [
    Aloha(),
    Aloha(adapt_to_pi=False),
    Aloha(relative=False),
    Droid(),
    Droid(action="joint_position"),
    Libero(),
    Libero(extra_delta=True),
    UR5(),
]
COLUMNS = {
    "observation/joint_position": np.arange(7.0)[None],
    "observation/gripper_position": np.array([9.0]),
    "action_dict/joint_velocity": np.full((1, 7), 0.1),
    "action_dict/joint_position": np.full((1, 7), 0.2),
    "action_dict/gripper_position": np.array([[0.5]]),
}


@pytest.mark.parametrize("robot", ROBOTS, ids=str)
def test_from_model_undoes_to_model_and_leaves_its_inputs_alone(robot):
    random = np.random.default_rng(0)
    state = random.uniform(0.1, 0.9, (3, len(robot.state_names)))
    actions = random.uniform(0.1, 0.9, (3, 4, len(robot.action_names)))
    given = state.copy(), actions.copy()
    seen_state, seen = robot.to_model(state, actions)
    np.testing.assert_allclose(robot.from_model(seen, state), actions, atol=1e-12)
    assert np.array_equal(state, given[0]) and np.array_equal(actions, given[1])
    assert seen_state.shape == state.shape and robot.to_model(state)[1] is None
    for number, name in enumerate(robot.action_names):
        is_relative = robot.delta_mask is not None and robot.delta_mask[number]
        moved = robot.to_model(state + 0.05, actions)[1]
        assert np.allclose(moved[..., number], seen[..., number]) != is_relative, name


@pytest.mark.parametrize("robot", ROBOTS, ids=str)
def test_names_are_distinct_and_end_in_units(robot):
    for names in (robot.state_names, robot.action_names):
        assert len(set(names)) == len(names)
        assert all(name.endswith(("_m", "_rad", "_rad_per_s", "_fraction", "_sign")) for name in names)
    assert robot.delta_mask is None or len(robot.delta_mask) == len(robot.action_names)


def test_columns_stand_side_by_side():
    steps = Droid().read(COLUMNS, np.array([1]))
    assert steps.state.tolist() == [[0, 1, 2, 3, 4, 5, 6, 9]]
    np.testing.assert_allclose(steps.actions, [[0.1] * 7 + [0.5]], rtol=1e-6)
    assert steps.use.all() and steps.state.dtype == steps.actions.dtype == np.float32
    np.testing.assert_allclose(Droid(action="joint_position").read(COLUMNS, np.array([1])).actions[0, 0], 0.2)


def test_what_is_missing_or_of_another_width_is_named():
    with pytest.raises(
        ValueError, match=r"the UR5 robot reads its state from joints, gripper; the dataset lacks joints"
    ):
        UR5().read(COLUMNS, np.array([1]))
    robot = Libero(state_columns=("observation/joint_position",))
    with pytest.raises(ValueError, match=r"the Libero robot has 8 state dims .* gives 7: observation/joint_position 7"):
        robot.read(COLUMNS, np.array([1]))


@pytest.mark.parametrize("adapt_to_pi", [True, False])
def test_alohas_units_equal_openpis(golden_file, adapt_to_pi):
    golden, case = np.load(golden_file("misc_transforms.npz")), f"adapt{int(adapt_to_pi)}"
    robot = Aloha(adapt_to_pi=adapt_to_pi, relative=False)
    state, actions = golden["aloha/state"], golden["aloha/actions"]
    seen_state, seen = robot.to_model(state, actions)
    np.testing.assert_allclose(seen_state, golden[f"aloha/in_state_{case}"], rtol=1e-12)
    np.testing.assert_allclose(seen, golden[f"aloha/in_actions_{case}"], rtol=1e-12)
    np.testing.assert_allclose(robot.from_model(actions, state), golden[f"aloha/out_actions_{case}"], rtol=1e-12)


def test_droids_and_liberos_states_and_cameras_equal_openpis(golden_file):
    expected = json.loads(golden_file("misc_meta.json").read_text())["policy_inputs_pi0"]
    assert Droid().read(COLUMNS, np.array([1])).state[0].tolist() == expected["droid"]["state"]
    columns = {"state": np.arange(8.0)[None], "actions": np.zeros((1, 7))}
    assert Libero().read(columns, np.array([1])).state[0].tolist() == expected["libero"]["state"]
    for name, robot in (("droid", Droid()), ("libero", Libero())):
        present = {slot for slot, mask in expected[name]["image_mask"].items() if mask}
        assert set(robot.cameras) == present
