"""Relative actions of an arm that a dataset's names describe: whole or refused, by name wherever a dim stands."""

import numpy as np
import pytest

from openpi_train.robots.dataset_arm import GRIPPERS, DatasetArm

ARM = ("j0", "j1", "j2", "gripper")


def arm(state, action, **fields):
    return DatasetArm(
        state_dims=tuple(state), action_dims=tuple(action), rate_hz=10.0, relative=True, grippers=GRIPPERS, **fields
    )


def seen(robot, state, actions):
    return robot.to_model(np.asarray(state, float), np.asarray([actions], float))[1][0].tolist()


@pytest.mark.parametrize(
    ("state", "action", "references"),
    [
        (ARM, ARM, (0, 1, 2, None)),
        (("gripper", "j0", "j1", "j2"), ARM, (1, 2, 3, None)),
        (("j0", "j1", "force", "j2", "gripper"), ARM, (0, 1, 3, None)),
        (("j0", "j1", "jaw"), ("j0", "j1", "jaw"), (0, 1, None)),
        # Velocities beside positions, and another spelling of the same joint.
        (("q_1.vel", "q_1.pos", "q_2.vel", "q_2.pos"), ("q_1.pos", "q_2.pos"), (1, 3)),
        (
            ("left_joint_1", "left_joint_2", "left_gripper"),
            ("main_left_joint_1.pos", "main_left_joint_2.pos", "main_left_gripper.pos"),
            (0, 1, None),
        ),
        (("joint_01", "joint_02"), ("Leader.Joint1", "Leader.Joint2"), (0, 1)),
        # Two arms, each with a gripper between the joints.
        (
            ("l_j0", "l_j1", "l_claw", "r_j0", "r_j1", "r_claw"),
            ("r_j0", "r_j1", "r_claw", "l_j0", "l_j1", "l_claw"),
            (3, 4, None, 0, 1, None),
        ),
        # A base that is driven by velocities under an arm (LeKiwi's names).
        (("shoulder.pos", "elbow.pos", "x.vel"), ("shoulder.pos", "elbow.pos", "x.vel"), (0, 1, None)),
    ],
)
def test_each_joint_is_relative_to_the_state_dim_of_its_name(state, action, references):
    robot = arm(state, action)
    assert robot.delta_mask == tuple(place is not None for place in references)
    values = 10.0 ** np.arange(len(state))
    wanted = [0.5 if place is None else 0.5 - values[place] for place in references]
    assert seen(robot, values, [0.5] * len(action)) == wanted
    actions = np.full((2, 3, len(action)), 0.5)
    states = np.stack([values, -values])
    relative = robot.to_model(states, actions)[1]
    assert relative is not None
    np.testing.assert_allclose(robot.from_model(relative, states), actions, rtol=1e-9)


@pytest.mark.parametrize(
    ("state", "action", "message"),
    [
        (("j0", "j1", "wrist", "gripper"), ARM, r"j2 of the action .* an arm is relative as a whole\. Say which"),
        # A dataset without names: numbers say nothing about which is which.
        (("state_0", "state_1"), ("action_0", "action_1"), r"action_0, action_1 of the action .* has no state dim"),
        (("leader_j0", "follower_j0"), ("j0",), "j0 of the action .* or several"),
        (("gripper", "y"), ("gripper", "finger_1"), "all of gripper, finger_1 are grippers, velocities or forces"),
        (("x", "y"), ("delta_x", "delta_y"), "all of delta_x, delta_y are grippers, velocities"),
        (("joint_1",), ("main_joint_1", "joint_1.pos"), "several action dims have the same state dim"),
    ],
)
def test_an_arm_that_would_be_relative_in_part_is_refused(state, action, message):
    robot = arm(state, action)
    with pytest.raises(ValueError, match=message):
        _ = robot.delta_mask
    with pytest.raises(ValueError, match=message):
        robot.read({"observation/state": np.zeros((1, len(state))), "action": np.zeros((1, len(action)))}, np.ones(1))


def test_fields_say_what_names_do_not():
    assert arm(("j0", "tool"), ("j0", "tool"), relative_to={"j0": "j0"}).delta_mask == (True, False)
    robot = arm(("state_0", "state_1"), ("action_0", "action_1"), relative_to={"action_0": "state_1"})
    assert seen(robot, [1, 10], [5, 5]) == [-5, 5]
    other = DatasetArm(
        state_dims=("a", "tool"), action_dims=("a", "tool"), rate_hz=1.0, relative=True, grippers=("tool",)
    )
    assert other.delta_mask == (True, False)
    with pytest.raises(ValueError, match=r"relative-to j0 x: .*no dim x; .* j0, .* state's dims j0"):
        _ = arm(("j0",), ("j0",), relative_to={"j0": "x"}).delta_mask


def test_dims_are_put_in_another_order_by_name():
    robot = arm(("g", "b", "a"), ("claw", "b", "a"), state_order=("a", "b"), action_order=("a", "b", "claw"))
    steps = robot.read(
        {"observation/state": np.array([[7.0, 2.0, 1.0]]), "action": np.array([[9.0, 5.0, 4.0]])}, np.ones(1)
    )
    assert steps.state.tolist() == [[1, 2]] and steps.actions.tolist() == [[4, 5, 9]]
    assert robot.state_names == ("a", "b") and robot.action_names == ("a", "b", "claw")
    assert seen(robot, steps.state[0], steps.actions[0]) == [3, 3, 9]
    with pytest.raises(ValueError, match=r"action-order a z: .*action dims.*: a"):
        wrong = DatasetArm(state_dims=("a",), action_dims=("a",), rate_hz=1.0, action_order=("a", "z"))
        wrong.read({"observation/state": np.zeros((1, 1)), "action": np.zeros((1, 1))}, np.ones(1))


def test_a_robot_that_was_saved_before_grippers_had_other_names_keeps_its_meaning():
    saved = DatasetArm(state_dims=("j0", "jaw"), action_dims=("j0", "jaw"), rate_hz=1.0, relative=True)
    assert saved.delta_mask == (True, True)
