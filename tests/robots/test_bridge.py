import numpy as np
import pytest

from openpi_train.robots.bridge import Bridge

ENDS = np.array([5, 9, 17])


def columns(width: int = 7, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    made = {name: random.normal(size=(17, width)).astype(np.float32) for name in ("observation/state", "action")}
    made["action"][5] = 0.0  # a null first action of the second episode, gripper aside
    made["action"][5, 6] = 1.0
    made["action"][7] = 0.0  # a rest in the middle of an episode is data
    return made


# Two steps and a last one; a yaw that passes pi between the first two. Bridge's own release records the pose and the
# gripper (1 open) as state, and the pose's change and the gripper's command as action.
RECORDED = {
    "observation/state": np.array(
        [
            [0.1, 0.2, 0.3, 0.0, 0.1, 3.1, 1.0],
            [0.15, 0.2, 0.25, 0.0, 0.2, -3.1, 0.9],
            [0.2, 0.1, 0.2, -0.1, 0.2, -3.0, 0.1],
        ]
    ),
    "action": np.array([[0.04, 0, -0.04, 0, 0.1, 0.07, 1], [0.05, -0.1, -0.05, -0.1, 0, 0.1, 0], [0.01] * 6 + [0]]),
}


def test_a_recorded_frame_has_the_numbers_of_octos_reader():
    """octo-models/octo at 241fb35: `relabel_actions` of data/utils/data_utils.py, reached pose less present one.

    Octo does not wrap angles, as we do, and its gripper is made 0 or 1 (`OpenX`).
    """
    plain = Bridge().read(RECORDED, np.array([3]))
    np.testing.assert_allclose(plain.state, RECORDED["observation/state"], rtol=1e-6)
    np.testing.assert_allclose(plain.actions, RECORDED["action"], rtol=1e-6)
    state, seen = Bridge().to_model(plain.state[0], plain.actions)
    np.testing.assert_allclose(seen, RECORDED["action"], rtol=1e-6)
    robot = Bridge(trajectory=True)
    steps = robot.read(RECORDED, np.array([3]))
    reached = [
        [0.15, 0.2, 0.25, 0.0, 0.2, -3.1, 1.0],
        [0.2, 0.1, 0.2, -0.1, 0.2, -3.0, 0.0],
        [0.2, 0.1, 0.2, -0.1, 0.2, -3.0, 0.0],
    ]
    np.testing.assert_allclose(steps.actions, reached, rtol=1e-6)
    state, seen = robot.to_model(steps.state[0], steps.actions[:2])
    np.testing.assert_allclose(state, RECORDED["observation/state"][0], rtol=1e-6)
    # 2 pi - 6.2 and 2 pi - 6.1; the gripper is as commanded.
    expected = [[0.05, 0.0, -0.05, 0.0, 0.1, 0.0831853, 1.0], [0.1, -0.1, -0.1, -0.1, 0.1, 0.1831853, 0.0]]
    np.testing.assert_allclose(seen, expected, atol=1e-6)


def test_deltas_are_read_as_recorded_and_only_null_first_actions_dropped():
    data = columns()
    steps = Bridge().read(data, ENDS)
    assert np.array_equal(steps.state, data["observation/state"])
    assert np.array_equal(steps.actions, data["action"])
    assert np.flatnonzero(~steps.use).tolist() == [5]


def test_trajectory_actions_are_the_next_states_with_the_recorded_gripper():
    data = columns()
    steps = Bridge(trajectory=True).read(data, ENDS)
    start = 0
    for end in ENDS:
        for step in range(start, end):
            following = min(step + 1, end - 1)
            assert np.array_equal(steps.actions[step, :6], data["observation/state"][following, :6])
            assert steps.actions[step, 6] == data["action"][step, 6]
        start = end


def test_dual_arm_layout_zero_pads_a_single_arm_and_takes_both():
    robot = Bridge(num_arms=2, trajectory=True)
    assert len(robot.action_names) == len(robot.state_names) == 14
    assert robot.action_names[0] == "first_x_m"
    single = robot.read(columns(), ENDS)
    assert single.actions.shape == (17, 14)
    assert not single.actions[:, 7:].any()
    assert not single.state[:, 7:].any()
    both = robot.read(columns(14), ENDS)
    assert np.array_equal(both.state, columns(14)["observation/state"])
    assert np.array_equal(both.actions[0, 7:13], both.state[1, 7:13])


@pytest.mark.parametrize("robot", [Bridge(), Bridge(trajectory=True), Bridge(trajectory=True, num_arms=2)])
def test_from_model_undoes_to_model(robot):
    random = np.random.default_rng(1)
    dims = len(robot.action_names)
    state = random.uniform(-1, 1, (5, dims)).astype(np.float32)
    actions = random.uniform(-1, 1, (5, 4, dims)).astype(np.float32)
    seen_state, seen = robot.to_model(state, actions)
    assert np.array_equal(seen_state, state)
    # Exact but for one rounding of x - s + s in float32.
    np.testing.assert_allclose(robot.from_model(seen, state), actions, atol=1e-6)
    assert seen.dtype == np.float32
    if robot.trajectory:
        np.testing.assert_allclose(seen[..., 0], actions[..., 0] - state[:, None, 0], atol=1e-6)
        assert np.array_equal(seen[..., 6], actions[..., 6])


def test_a_yaw_that_passes_pi_is_a_small_relative_angle_and_comes_back_up_to_a_turn():
    robot = Bridge(trajectory=True)
    state, actions = np.zeros((1, 7), np.float32), np.zeros((1, 1, 7), np.float32)
    state[0, 5], actions[0, 0, 5] = 3.1, -3.1
    _, seen = robot.to_model(state, actions)
    assert seen is not None
    np.testing.assert_allclose(seen[0, 0, 5], 2 * np.pi - 6.2, atol=1e-6)
    np.testing.assert_allclose(np.exp(1j * robot.from_model(seen, state)[0, 0, 5]), np.exp(-3.1j), atol=1e-6)


def test_serving_needs_no_actions():
    state = np.ones(7, np.float32)
    seen, actions = Bridge(trajectory=True).to_model(state)
    assert actions is None
    assert np.array_equal(seen, state)


def test_a_missing_column_and_a_wrong_width_name_what_there_is():
    data = columns()
    with pytest.raises(ValueError, match=r"'observation/state'; the dataset has action, observation/pose"):
        Bridge().read({"observation/pose": data["observation/state"], "action": data["action"]}, ENDS)
    with pytest.raises(ValueError, match=r"'action' has shape \[8\] per step; .* reads 7 dims"):
        Bridge().read(data | {"action": np.zeros((17, 8))}, ENDS)
    with pytest.raises(ValueError, match="num_arms 3 is not 1 or 2"):
        Bridge(num_arms=3)


def test_names_end_with_units():
    for robot in (Bridge(), Bridge(trajectory=True, num_arms=2)):
        for name in (*robot.state_names, *robot.action_names):
            assert name.rsplit("_", 1)[1] in {"m", "rad", "fraction"}
    assert Bridge().control_hz == 5.0
