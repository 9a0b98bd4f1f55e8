"""Robots that are read column by column: names, both directions, and what is said where the data do not fit."""

import dataclasses
import json

import numpy as np
import pytest

from openpi_train.robots.aloha import Aloha
from openpi_train.robots.dataset_arm import DatasetArm
from openpi_train.robots.droid import Droid
from openpi_train.robots.libero import Libero
from openpi_train.robots.metaworld import MetaWorld
from openpi_train.robots.numbered import Numbered
from openpi_train.robots.pusht import PushT
from openpi_train.robots.robotwin import RoboTwin
from openpi_train.robots.tabletop import Tabletop
from openpi_train.robots.ur5 import UR5

SO_101 = ("shoulder_pan.pos", "elbow_flex.pos", "gripper.pos")
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Frames:
    """Two control steps as a dataset records them, and what a published reader makes of them.

    `seen` are the state of the first step and both actions, as the model sees them in a chunk that starts there.
    """

    columns: dict[str, list]
    state: list[list[float]]
    actions: list[list[float]]
    seen: tuple[list[float], list[list[float]]]


ZERO_TO_SIX = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
ABOVE = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6]
# openpi at 15a9616, policies/droid_policy.py (state: joints, gripper), training/droid_rlds_dataset.py (the action's
# parts), training/config.py (DeltaActions of make_bool_mask(7, -1) for positions): the gripper is not relative.
DROID = {
    "observation/joint_position": [ZERO_TO_SIX, ABOVE],
    "observation/gripper_position": [[0.7], [0.8]],
    "action_dict/joint_velocity": [[0.01] * 7, [0.02] * 7],
    "action_dict/joint_position": [ABOVE, ABOVE],
    "action_dict/gripper_position": [[0.25], [1.0]],
}
ARMS = [[*ZERO_TO_SIX, 0.7], [*ABOVE, 0.8]]
# openpi, policies/libero_policy.py; config.py: DeltaActions of make_bool_mask(6, -1) with extra_delta_transform.
LIBERO = {"state": [[*ZERO_TO_SIX, -0.6], [*ABOVE, -0.6]], "actions": [[0.5] * 6 + [-1.0], [0.5] * 6 + [1.0]]}
# openpi, policies/aloha_policy.py: joints 1 and 2 of each arm have the other sign; the state's gripper by the linkage,
# the command's by its angle; config.py: DeltaActions of make_bool_mask(6, -1, 6, -1).
ALOHA = {
    "observation/state": [[0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 0.5], [0.0] * 14],
    "action": [[0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], [0.0] * 14],
}
PI_STATE = [0.1, -0.2, -0.3, 0.4, 0.5, 0.6, -1.0798655, 1.1, -1.2, -1.3, 1.4, 1.5, 1.6, -0.1400559]
PI_ACTIONS = [
    [0.2, -0.2, -0.2, 0.2, 0.2, 0.2, -1.1689, 1.0, -1.0, -1.0, 1.0, 1.0, 1.0, 0.9434],
    [0.0] * 6 + [-1.1689] + [0.0] * 6 + [-1.1689],
]
PI_RELATIVE = [
    [0.1, 0.0, 0.1, -0.2, -0.3, -0.4, -1.1689, -0.1, 0.2, 0.3, -0.4, -0.5, -0.6, 0.9434],
    [-0.1, 0.2, 0.3, -0.4, -0.5, -0.6, -1.1689, -1.1, 1.2, 1.3, -1.4, -1.5, -1.6, -1.1689],
]
# openpi, examples/ur5/README.md: joints and gripper, DeltaActions of make_bool_mask(6, -1).
UR = {"joints": [ZERO_TO_SIX[:6], ABOVE[:6]], "gripper": [[0.7], [0.8]], "actions": [[*ABOVE[:6], 0.25], [0.0] * 7]}
STATE_14, STATE_16 = [n / 10 for n in range(14)], [n / 10 for n in range(16)]
CASES = {
    "droid-velocity": (
        Droid(),
        Frames(
            columns=DROID,
            state=ARMS,
            actions=[[0.01] * 7 + [0.25], [0.02] * 7 + [1.0]],
            seen=(ARMS[0], [[0.01] * 7 + [0.25], [0.02] * 7 + [1.0]]),
        ),
    ),
    "droid-position": (
        Droid(action="joint_position"),
        Frames(
            columns=DROID,
            state=ARMS,
            actions=[[*ABOVE, 0.25], [*ABOVE, 1.0]],
            seen=(ARMS[0], [[1.0] * 7 + [0.25], [1.0] * 7 + [1.0]]),
        ),
    ),
    "libero": (
        Libero(),
        Frames(
            columns=LIBERO,
            state=LIBERO["state"],
            actions=LIBERO["actions"],
            seen=(LIBERO["state"][0], LIBERO["actions"]),
        ),
    ),
    "libero-extra-delta": (
        Libero(extra_delta=True),
        Frames(
            columns=LIBERO,
            state=LIBERO["state"],
            actions=LIBERO["actions"],
            seen=(LIBERO["state"][0], [[0.5, 0.4, 0.3, 0.2, 0.1, 0.0, -1.0], [0.5, 0.4, 0.3, 0.2, 0.1, 0.0, 1.0]]),
        ),
    ),
    "aloha": (
        Aloha(),
        Frames(columns=ALOHA, state=ALOHA["observation/state"], actions=ALOHA["action"], seen=(PI_STATE, PI_RELATIVE)),
    ),
    "aloha-absolute": (
        Aloha(relative=False),
        Frames(columns=ALOHA, state=ALOHA["observation/state"], actions=ALOHA["action"], seen=(PI_STATE, PI_ACTIONS)),
    ),
    "aloha-as-recorded": (
        Aloha(adapt_to_pi=False),
        Frames(
            columns=ALOHA,
            state=ALOHA["observation/state"],
            actions=ALOHA["action"],
            seen=(
                ALOHA["observation/state"][0],
                [
                    [0.1, 0.0, -0.1, -0.2, -0.3, -0.4, 0.0, -0.1, -0.2, -0.3, -0.4, -0.5, -0.6, 1.0],
                    [-0.1, -0.2, -0.3, -0.4, -0.5, -0.6, 0.0, -1.1, -1.2, -1.3, -1.4, -1.5, -1.6, 0.0],
                ],
            ),
        ),
    ),
    "ur5": (
        UR5(),
        Frames(
            columns=UR,
            state=[[*ZERO_TO_SIX[:6], 0.7], [*ABOVE[:6], 0.8]],
            actions=UR["actions"],
            seen=([*ZERO_TO_SIX[:6], 0.7], [[1.0] * 6 + [0.25], [0.0, -0.1, -0.2, -0.3, -0.4, -0.5, 0.0]]),
        ),
    ),
    # RoboTwin stable_2.0, policy/DP/process_data.py: the joint vector as state, the next step's as action.
    "robotwin": (
        RoboTwin(),
        Frames(
            columns={"state": [STATE_14, STATE_14], "action": [[2.0] * 14, STATE_14]},
            state=[STATE_14, STATE_14],
            actions=[[2.0] * 14, STATE_14],
            seen=(STATE_14, [[2.0] * 14, STATE_14]),
        ),
    ),
    "robotwin-16": (
        RoboTwin(dims=16),
        Frames(
            columns={"state": [STATE_16, STATE_16], "action": [[2.0] * 16, STATE_16]},
            state=[STATE_16, STATE_16],
            actions=[[2.0] * 16, STATE_16],
            seen=(STATE_16, [[2.0] * 16, STATE_16]),
        ),
    ),
    # real-stanford/diffusion_policy at 5ba07ac, dataset/pusht_image_dataset.py: agent_pos is the state's first two
    # numbers of five; pusht_dataset.py: the keypoints before it.
    "pusht": (
        PushT(),
        Frames(
            columns={"state": [[10, 20, 30, 40, 5], [11, 21, 31, 41, 6]], "action": [[100, 200], [101, 201]]},
            state=[[10, 20], [11, 21]],
            actions=[[100, 200], [101, 201]],
            seen=([10, 20], [[100, 200], [101, 201]]),
        ),
    ),
    "pusht-keypoints": (
        PushT(keypoints=True),
        Frames(
            columns={
                "keypoint": [[[n, n + 0.5] for n in range(9)]] * 2,
                "state": [[10, 20, 30, 40, 5], [11, 21, 31, 41, 6]],
                "action": [[100, 200], [101, 201]],
            },
            state=[[*(n / 2 for n in range(18)), 10, 20], [*(n / 2 for n in range(18)), 11, 21]],
            actions=[[100, 200], [101, 201]],
            seen=([*(n / 2 for n in range(18)), 10, 20], [[100, 200], [101, 201]]),
        ),
    ),
    # Farama's Meta-World 3, sawyer_xyz_env.py: 18 numbers, those of the step before, and the goal.
    "metaworld": (
        MetaWorld(),
        Frames(
            columns={"state": [[n / 10 for n in range(39)]] * 2, "action": [[0.1, -1.0, 1.0, -0.5], [0.0] * 4]},
            state=[[n / 10 for n in range(39)]] * 2,
            actions=[[0.1, -1.0, 1.0, -0.5], [0.0] * 4],
            seen=([n / 10 for n in range(39)], [[0.1, -1.0, 1.0, -0.5], [0.0] * 4]),
        ),
    ),
    # Our own environment's: pose deltas, and a gripper of 0 closed .. 1 open (`envs/tabletop_world.py`).
    "tabletop": (
        Tabletop(),
        Frames(
            columns={"observation/state": [ZERO_TO_SIX, ABOVE], "action": [[0.01] * 6 + [1.0], [0.0] * 7]},
            state=[ZERO_TO_SIX, ABOVE],
            actions=[[0.01] * 6 + [1.0], [0.0] * 7],
            seen=(ZERO_TO_SIX, [[0.01] * 6 + [1.0], [0.0] * 7]),
        ),
    ),
    "numbered": (
        Numbered(num_state_dims=2, num_action_dims=3),
        Frames(
            columns={"state": [[1, 2], [3, 4]], "action": [[5, 6, 7], [8, 9, 10]]},
            state=[[1, 2], [3, 4]],
            actions=[[5, 6, 7], [8, 9, 10]],
            seen=([1, 2], [[5, 6, 7], [8, 9, 10]]),
        ),
    ),
    # lerobot 0.6.1, processor/relative_action_processor.py with exclude_joints ["gripper"]; names of an SO-101.
    "dataset-arm": (
        DatasetArm(state_dims=SO_101, action_dims=SO_101, rate_hz=30.0, relative=True),
        Frames(
            columns={"observation/state": [[1, 2, 3], [4, 5, 6]], "action": [[10, 20, 30], [40, 50, 60]]},
            state=[[1, 2, 3], [4, 5, 6]],
            actions=[[10, 20, 30], [40, 50, 60]],
            seen=([1, 2, 3], [[9, 18, 30], [39, 48, 60]]),
        ),
    ),
    "dataset-arm-absolute": (
        DatasetArm(state_dims=SO_101, action_dims=SO_101, rate_hz=30.0),
        Frames(
            columns={"observation/state": [[1, 2, 3], [4, 5, 6]], "action": [[10, 20, 30], [40, 50, 60]]},
            state=[[1, 2, 3], [4, 5, 6]],
            actions=[[10, 20, 30], [40, 50, 60]],
            seen=([1, 2, 3], [[10, 20, 30], [40, 50, 60]]),
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_frames_are_those_of_the_published_reader(name):
    robot, frames = CASES[name]
    steps = robot.read({key: np.asarray(value, np.float64) for key, value in frames.columns.items()}, np.array([2]))
    np.testing.assert_allclose(steps.state, frames.state, rtol=1e-6)
    np.testing.assert_allclose(steps.actions, frames.actions, rtol=1e-6)
    assert steps.use.all() and steps.state.dtype == steps.actions.dtype == np.float32
    given = steps.state[0].copy(), steps.actions.copy()
    seen_state, seen = robot.to_model(*given)
    # Rounding of float32.
    np.testing.assert_allclose(seen_state, frames.seen[0], atol=2e-6, rtol=1e-6)
    np.testing.assert_allclose(seen, frames.seen[1], atol=2e-6, rtol=1e-6)
    np.testing.assert_allclose(robot.to_model(given[0])[0], frames.seen[0], atol=2e-6, rtol=1e-6)
    back = robot.from_model(np.asarray(frames.seen[1], np.float32), given[0])
    np.testing.assert_allclose(back, frames.actions, atol=2e-6, rtol=1e-6)
    # Inputs are left alone.
    assert np.array_equal(given[0], steps.state[0]) and np.array_equal(given[1], steps.actions)


@pytest.mark.parametrize("robot", ROBOTS, ids=str)
def test_names_are_distinct_and_end_in_units(robot):
    for names in (robot.state_names, robot.action_names):
        assert len(set(names)) == len(names)
        assert all(name.endswith(("_m", "_rad", "_rad_per_s", "_fraction", "_sign")) for name in names)
    assert robot.delta_mask is None or len(robot.delta_mask) == len(robot.action_names)


def test_what_is_missing_or_of_another_width_is_named():
    with pytest.raises(ValueError, match=r"UR5 .*state from joints, gripper; .*lacks joints"):
        UR5().read(COLUMNS, np.array([1]))
    robot = Libero(state_columns=("observation/joint_position",))
    with pytest.raises(ValueError, match=r"Libero .*8 state dims .* 7: observation/joint_position 7"):
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


def test_names_of_grippers_say_which_way_they_count():
    said = {
        "gripper_closed_fraction": (Droid(), Droid(action="joint_position")),  # openpi: 1 closed
        "gripper_closing_sign": (Libero(), Libero(extra_delta=True)),  # robosuite: 1 closes
        "gripper_fraction": (UR5(), RoboTwin(dims=10), Tabletop()),  # 1 open
        "right_gripper_fraction": (Aloha(), RoboTwin(), RoboTwin(dims=16)),
        "closing_effort": (MetaWorld(),),  # Meta-World: 1 closes
    }
    for name, robots in said.items():
        assert {robot.action_names[-1] for robot in robots} == {name}
