"""Every robot of the package: what the model is trained on comes back as what the robot recorded."""

import dataclasses
import importlib
import pkgutil

import numpy as np
import pytest

from openpi_train import robots
from openpi_train.robots.aloha import Aloha
from openpi_train.robots.arm import Arm
from openpi_train.robots.bridge import Bridge
from openpi_train.robots.dataset_arm import DatasetArm
from openpi_train.robots.droid import Droid
from openpi_train.robots.libero import Libero
from openpi_train.robots.metaworld import MetaWorld
from openpi_train.robots.numbered import Numbered
from openpi_train.robots.openx import OpenX
from openpi_train.robots.openx_layouts import LAYOUTS
from openpi_train.robots.pusht import PushT
from openpi_train.robots.robot import Robot
from openpi_train.robots.robotwin import RoboTwin
from openpi_train.robots.tabletop import Tabletop
from openpi_train.robots.ur5 import UR5

ROBOTS = [
    *(Aloha(adapt_to_pi=adapt, relative=relative) for adapt in (True, False) for relative in (True, False)),
    *(Bridge(num_arms=arms, trajectory=trajectory) for arms in (1, 2) for trajectory in (True, False)),
    DatasetArm(state_dims=("a", "b", "gripper"), action_dims=("a", "b", "gripper"), rate_hz=10.0, relative=True),
    Droid(),
    Droid(action="joint_position"),
    Libero(),
    Libero(extra_delta=True),
    MetaWorld(),
    Numbered(num_state_dims=8),
    *(OpenX(layout=layout) for layout in LAYOUTS),
    PushT(),
    PushT(keypoints=True),
    *(RoboTwin(dims=dims) for dims in (10, 14, 16)),
    Tabletop(),
    UR5(),
]


def test_no_robot_of_the_package_is_missing_here():
    for module in pkgutil.iter_modules(robots.__path__):
        importlib.import_module(f"openpi_train.robots.{module.name}")
    found, waiting = set(), [Robot]
    while waiting:
        classes = [robot for robot in waiting.pop().__subclasses__() if robot.__module__.startswith("openpi_train.")]
        found |= set(classes)
        waiting += classes
    assert found - {Arm} == {type(robot) for robot in ROBOTS}


@pytest.mark.parametrize("robot", ROBOTS, ids=lambda robot: f"{type(robot).__name__}-{len(robot.action_names)}")
@pytest.mark.parametrize("leading", [(), (5,)])
def test_from_model_undoes_to_model(robot, leading):
    random = np.random.default_rng(0)
    # Within the range of every joint and gripper, and angles of less than pi apart.
    state = random.uniform(0.1, 0.9, (*leading, len(robot.state_names)))
    actions = random.uniform(0.1, 0.9, (*leading, 4, len(robot.action_names)))
    seen_state, seen = robot.to_model(state.copy(), actions.copy())
    np.testing.assert_allclose(robot.from_model(seen, state), actions, atol=1e-12)
    assert seen_state.shape == state.shape and seen.shape == actions.shape
    assert robot.to_model(state)[1] is None
    np.testing.assert_array_equal(robot.to_model(state)[0], seen_state)
    assert isinstance(dataclasses.replace(robot), type(robot))
