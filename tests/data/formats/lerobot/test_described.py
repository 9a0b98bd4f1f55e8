"""The robot that a LeRobot dataset's features describe, and what an experiment becomes with it."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from openpi_train_configs.act_runs import act_aloha_sim
from openpi_train_configs.fast import pi0_fast_tiny
from openpi_train_configs.metaworld_rl import metaworld_rloo
from openpi_train_configs.robot_dp import pusht_dp
from openpi_train_configs.tabletop_runs import pi0_bridge_traj_tiny, tabletop_dp

from openpi_train.choice import on_dataset, on_features
from openpi_train.cli import parse_experiment
from openpi_train.data.formats.lerobot import LeRobot
from openpi_train.data.formats.lerobot.described import _own_slots, _placed, described
from openpi_train.envs.closed_loop import ClosedLoop
from openpi_train.fields import as_json
from openpi_train.models.exact_policy import ExactPolicyConfig
from openpi_train.policy.experiment_json import experiment_from_json
from openpi_train.robots.dataset_arm import GRIPPERS, DatasetArm
from openpi_train.runtime.exits import DataError, UsageError
from openpi_train.types import OPENPI_SLOTS

FOLDER = Path(__file__).parent / "fixtures" / "v30_image"
JOINTS = (*(f"joint_{number}" for number in range(6)), "gripper")
FEATURES = {"front": "observation/images/front", "wrist": "observation/images/wrist"}


def test_dims_names_rate_and_cameras_are_the_datasets():
    robot = described(FOLDER)
    assert robot == DatasetArm(
        cameras=FEATURES,
        state_columns=("observation/state",),
        action_columns=("action",),
        state_dims=JOINTS,
        action_dims=JOINTS,
        rate_hz=10.0,
        grippers=GRIPPERS,
    )
    source = LeRobot(path=str(FOLDER)).open()
    steps = robot.read(source.columns, source.episode_ends)
    np.testing.assert_array_equal(steps.actions, source.columns["action"])
    np.testing.assert_array_equal(steps.state, source.columns["observation/state"])
    assert robot.state_keys == ("observation/state",) and robot.control_hz == 10 and robot.delta_mask is None


def test_relative_are_dims_of_the_states_names_but_grippers():
    robot = described(FOLDER, relative=True)
    assert robot.delta_mask == (True,) * 6 + (False,)
    state, actions = np.arange(7.0), np.full((3, 7), 10.0)
    _, seen = robot.to_model(state, actions)
    assert seen is not None and seen[0].tolist() == [10, 9, 8, 7, 6, 5, 10]
    np.testing.assert_array_equal(robot.from_model(seen, state), actions)


@pytest.fixture
def changed(tmp_path):
    """A function that changes the features in a copy of the dataset's metadata, and returns its folder."""

    def change(**features):
        shutil.copytree(FOLDER / "meta", tmp_path / "meta")
        file = tmp_path / "meta" / "info.json"
        info = json.loads(file.read_text())
        for name, feature in features.items():
            found = info["features"].pop(name.replace("__", "."), {})
            info["features"] |= {new.replace("__", "."): found | fields for new, fields in feature.items()}
        file.write_text(json.dumps(info))
        return tmp_path

    return change


def test_other_names_are_known_and_dims_without_names_are_numbered(changed):
    folder = changed(observation__state={"state": {"names": None}}, action={"actions": {"names": ["a", "b"]}})
    robot = described(folder)
    assert (robot.state_columns, robot.action_columns) == (("state",), ("actions",))
    assert robot.state_dims == tuple(f"state_{number}" for number in range(7))
    assert robot.action_dims == tuple(f"action_{number}" for number in range(7))


def test_a_robot_of_one_dim_is_one(changed):
    folder = changed(
        observation__state={"observation.state": {"shape": [1], "names": ["lift_m"]}},
        action={"action": {"shape": [1], "names": ["lift_m"]}},
    )
    robot = described(folder, relative=True)
    assert robot.state_dims == robot.action_dims == ("lift_m",) and robot.delta_mask == (True,)
    columns = {"observation/state": np.arange(3.0), "action": np.arange(3.0) + 1}
    steps = robot.read(columns, np.array([3]))
    assert steps.state.tolist() == [[0], [1], [2]] and steps.actions.tolist() == [[1], [2], [3]]
    np.testing.assert_array_equal(robot.to_model(steps.state, steps.actions[:, None])[1], np.ones((3, 1, 1)))


def test_a_dataset_without_a_state_is_refused_with_what_it_has(changed):
    folder = changed(observation__state={"joints": {}})
    with pytest.raises(ValueError, match=r"no feature observation.state or state .* it has action \[7\], joints \[7\]"):
        described(folder)


def test_a_camera_has_a_slot_of_its_own_name():
    assert _own_slots(["observation.image", "top"]) == {"image": "observation.image", "top": "top"}
    assert _own_slots(["left.rgb", "right.rgb"]) == {"left_rgb": "left.rgb", "right_rgb": "right.rgb"}


@pytest.mark.parametrize(
    ("cameras", "placed"),
    [
        (["front", "wrist"], {"base_0_rgb": "front", "left_wrist_0_rgb": "wrist"}),
        (["right_wrist", "top"], {"base_0_rgb": "top", "right_wrist_0_rgb": "right_wrist"}),
        (
            ["cam_right_wrist", "cam_left_wrist", "cam_high"],
            {"base_0_rgb": "cam_high", "left_wrist_0_rgb": "cam_left_wrist", "right_wrist_0_rgb": "cam_right_wrist"},
        ),
        (["top", "side"], {"base_0_rgb": "top", "left_wrist_0_rgb": "side"}),
        (["wrist"], {"left_wrist_0_rgb": "wrist"}),
        (
            ["a", "b", "c", "hand"],
            {"base_0_rgb": "a", "left_wrist_0_rgb": "hand", "right_wrist_0_rgb": "b"},
        ),
        ([], {}),
    ],
)
def test_cameras_take_the_slots_that_fit_them_and_others_are_told(cameras, placed, caplog):
    assert _placed(cameras, OPENPI_SLOTS) == placed
    assert ("no camera slot left for c: left out" in caplog.text) == (len(cameras) == 4)


def test_a_model_without_padded_dims_is_told_dims_and_cameras_and_the_run_can_be_read_again():
    for base in (act_aloha_sim, pusht_dp, tabletop_dp):
        found = on_features(on_dataset(base, LeRobot(path=str(FOLDER))), relative=False)
        model = found.model
        assert (model.action_dim, model.state_dim, model.cameras) == (7, 7, ("front", "wrist"))
        assert found.robot_eval.closed_loop == ClosedLoop()
        found.demonstrations.check_dims(model)
        found.data.batch_spec(model, 2)
        saved = json.loads(json.dumps(as_json(dataclasses.replace(found, exp_name="x"))))
        assert experiment_from_json(saved).demonstrations.datasets[0].robot == described(FOLDER)


def test_an_experiment_that_is_chosen_by_dims_is_any_with_the_datasets_own():
    words = ["--exp-name", "x", "--dataset", str(FOLDER)]
    with pytest.raises(DataError, match=r"\[7\] per step there.*of any dims trains with --data\.robot recorded"):
        parse_experiment("robot_dp_tiny", words)
    found = parse_experiment("robot_dp_tiny", [*words, "--data.robot", "recorded"])
    assert isinstance(found.model, ExactPolicyConfig)
    assert found.name == "robot_dp_tiny" and (found.model.action_dim, found.model.state_dim) == (7, 7)


def test_other_models_keep_their_slots():
    for base, slots in ((pi0_bridge_traj_tiny, OPENPI_SLOTS), (pi0_fast_tiny, pi0_fast_tiny.model.camera_slots)):
        found = on_features(on_dataset(base, LeRobot(path=str(FOLDER))), relative=True)
        (dataset,) = found.demonstrations.datasets
        assert found.model == base.model and dataset.robot.delta_mask and dataset.asset == "v30_image"
        wrist = next(slot for slot in slots if "wrist" in slot)
        assert dataset.robot.cameras == {"base_0_rgb": FEATURES["front"], wrist: FEATURES["wrist"]}


def test_other_formats_rl_and_what_is_not_there_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"for LeRobot datasets and zarr stores.* is Rlds: .* NEW --to lerobot`"):
        on_features(pi0_bridge_traj_tiny, relative=False)
    with pytest.raises(DataError, match="holds no zarr store"):
        on_features(pusht_dp, relative=False)
    with pytest.raises(UsageError, match="learns from rollouts with a robot of its environment"):
        on_features(on_dataset(metaworld_rloo, LeRobot(path=str(FOLDER))), relative=False)
    with pytest.raises(DataError, match="holds no LeRobot dataset"):
        on_features(on_dataset(act_aloha_sim, LeRobot(path=str(tmp_path))), relative=False)
