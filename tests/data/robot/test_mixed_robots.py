"""Robots of a mixture: their dims by name and place, and their rates."""

import dataclasses
import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest

from openpi_train.cli import parse_experiment
from openpi_train.data.formats.lerobot import LeRobot
from openpi_train.data.make.fake import FakeData
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.data.robot.mixed_robots import differences
from openpi_train.data.robot.opened import open_windows
from openpi_train.data.robot.windows import WindowShape
from openpi_train.robots.bridge import Bridge
from openpi_train.robots.dataset_arm import DatasetArm
from openpi_train.robots.numbered import Numbered
from openpi_train.robots.openx import OpenX
from openpi_train.robots.tabletop import Tabletop

FIXTURE = Path(__file__).parents[1] / "formats" / "lerobot" / "fixtures" / "v30_image"


def arm(*dims, rate_hz=10.0, state=None):
    return DatasetArm(state_dims=state or dims, action_dims=dims, rate_hz=rate_hz)


def said(*robots, allowed=()):
    return list(differences([(f"d{number}", robot) for number, robot in enumerate(robots)], allowed))


def test_robots_whose_dims_mean_the_same_are_mixed():
    assert not said(Bridge(), Tabletop())
    assert not said(arm("a", "b"), arm("a", "b"), arm("a", "b", "c"))
    assert not said(arm("a", rate_hz=30.0), arm("a", rate_hz=30000 / 1001))


def test_another_order_is_told_with_the_flag_that_maps_it():
    (problem,) = said(arm("j0", "j1", "gripper"), arm("gripper", "j0", "j1", state=("j0", "j1", "gripper")))
    assert "action dim 0 of --data.datasets.1 (d1) is 'gripper', and of dataset 0 (d0) 'j0'" in problem
    assert "--data.datasets.1.robot.action-order j0 j1 gripper; or" in problem
    mapped = dataclasses.replace(arm("gripper", "j0", "j1"), action_order=("j0", "j1", "gripper"))
    mapped = dataclasses.replace(mapped, state_order=("j0", "j1", "gripper"))
    assert not said(arm("j0", "j1", "gripper"), mapped)
    assert "name them alike: --data.datasets.1.robot.state-dims a b;" in said(arm("a", "b"), arm("c", "d"))[1]


def test_another_rate_is_told_and_each_difference_can_be_allowed():
    (problem,) = said(arm("a", rate_hz=50.0), arm("a"))
    assert "d1) has 10 control steps per second, dataset 0 (d0) 50" in problem and "5 times as long" in problem
    assert "--data.may-differ rate" in problem
    assert not said(arm("a", rate_hz=50.0), arm("a"), allowed=("rate",))
    both = said(OpenX(), OpenX(layout="viola"))
    assert ["state dim 0" in both[0], "control steps per second" in both[1], len(both)] == [True, True, 2]
    assert not said(OpenX(), OpenX(layout="viola"), allowed=("state", "rate"))
    assert len(said(Bridge(), Numbered(rate_hz=5.0), allowed=("actions", "rate"))) == 1


def test_relative_and_absolute_actions_of_one_name_are_told():
    relative = dataclasses.replace(arm("j0", "gripper"), relative=True)
    (problem,) = said(arm("j0", "gripper"), relative)
    assert problem.startswith("action dims j0 of --data.datasets.1 (d1) and of dataset 0 (d0) are relative")
    assert not said(relative, relative) and not said(relative, arm("j0", "gripper"), allowed=("actions",))


def test_a_run_names_its_relative_dims(open_small, caplog):
    caplog.set_level(logging.INFO)
    names = (*(f"j{number}" for number in range(6)), "jaw")
    robot = dataclasses.replace(arm(*names), relative=True, grippers=("jaw",), cameras=Bridge().cameras)
    open_small(DataConfig(datasets=(Dataset(source=FakeData(image_height=12, image_width=16), robot=robot),)))
    said_so = "actions relative to the state at the chunk's start: j0, j1, j2, j3, j4, j5; as they are: jaw"
    assert f"data: FakeData: {said_so}" in caplog.text


def test_a_config_is_refused_before_anything_is_opened():
    datasets = [Dataset(source=FakeData(), robot=robot) for robot in (arm("a", "b"), arm("b", "a", rate_hz=50.0))]
    problems = DataConfig(datasets=tuple(datasets)).check()
    assert len(problems) == 3 and all("--data.datasets.1" in problem for problem in problems)
    assert not DataConfig(datasets=tuple(datasets), may_differ=("actions", "state", "rate")).check()


@pytest.fixture
def other(tmp_path):
    """A copy of the LeRobot dataset whose action begins with the gripper, at another rate."""
    shutil.copytree(FIXTURE, tmp_path / "other")
    file = tmp_path / "other/meta/info.json"
    info = json.loads(file.read_text())
    names = info["features"]["action"]["names"]
    info["features"]["action"]["names"] = [names[-1], *names[:-1]]
    file.write_text(json.dumps(info))
    return tmp_path / "other"


def test_recorded_robots_of_two_datasets_are_told_apart_and_mapped_by_flags(other, caplog):
    caplog.set_level(logging.INFO)
    words = ["--exp-name", "x", "--data.mixture", str(FIXTURE), str(other), "--data.robot", "recorded"]
    found = parse_experiment("pi0_bridge_traj_tiny", words)
    for folder in (FIXTURE, other):
        assert f"the robot of {folder}: state observation/state (7 dims)" in caplog.text
    (problem,) = found.data.check()
    flag = problem.split("in one order with ")[1].split(";")[0].split()
    found = parse_experiment("pi0_bridge_traj_tiny", [*words, *flag])
    assert not found.data.check()
    assert found.data.datasets[0].robot.action_names == found.data.datasets[1].robot.action_names
    allowed = parse_experiment("pi0_bridge_traj_tiny", [*words, "--data.may-differ", "actions", "state"])
    assert allowed.data.may_differ == ("actions", "state") and not allowed.data.check()


def test_relative_actions_of_an_unnamed_arm_are_an_error_of_the_config_and_a_flag_repairs_it(other):
    words = ["--exp-name", "x", "--dataset", str(other), "--data.robot", "relative"]
    file = other / "meta/info.json"
    info = json.loads(file.read_text())
    info["features"]["action"]["names"] = None
    file.write_text(json.dumps(info))
    (problem,) = parse_experiment("pi0_bridge_traj_tiny", words).data.check()
    assert "--data.datasets.0: relative actions: action_0, action_1" in problem
    flags = ["--data.datasets.0.robot.relative-to", "action_0", "joint_0", "action_1", "joint_2"]
    found = parse_experiment("pi0_bridge_traj_tiny", [*words, *flags])
    robot = found.data.datasets[0].robot
    assert not found.data.check() and robot.delta_mask == (True, True, *[False] * 5)
    assert robot.delta_reference[:2] == (0, 2)


def test_rates_that_two_datasets_record_are_compared_though_the_robot_is_the_same(other, tmp_path, caplog):
    file = other / "meta/info.json"
    info = json.loads(file.read_text())
    cameras = {}
    robot = arm(*(f"d{number}" for number in range(7)))
    one, two = (
        Dataset(
            source=LeRobot(path=str(folder), cache_dir=str(tmp_path / "index")),
            robot=dataclasses.replace(robot, cameras=cameras),
        )
        for folder in (FIXTURE, other)
    )
    config, shape = DataConfig(datasets=(one, two)), WindowShape(horizon=2)
    assert len(open_windows(config, shape)) == 2 and "control steps per second" not in caplog.text
    file.write_text(json.dumps(info | {"fps": 50}))
    with pytest.raises(ValueError, match=r"other has 50 control steps per second, v30_image 10"):
        open_windows(config, shape)
    assert "other says 50 control steps per second, and its robot 10" in caplog.text
    windows = open_windows(dataclasses.replace(config, may_differ=("rate",)), shape)
    assert np.array_equal(windows[0].steps.state, windows[1].steps.state)
