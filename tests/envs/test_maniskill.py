"""ManiSkill's observations, and what is said where it is missing; `test_real_simulators.py` has the package."""

import sys

import numpy as np
import pytest

from openpi_train.envs import maniskill
from openpi_train.envs.gym_observation import is_picture
from openpi_train.envs.named_envs import environment
from openpi_train.runtime.exits import UsageError


def test_pictures_are_called_by_their_camera_and_all_else_by_its_path():
    """The form is that of ManiSkill 3.0.1, observation mode rgb, behind its CPUGymWrapper."""
    seen = {
        "agent": {"qpos": np.zeros(9), "qvel": np.ones(9)},
        "extra": {"goal_pos": np.zeros(3), "is_grasped": np.bool_(False)},
        "sensor_param": {"base_camera": {"intrinsic_cv": np.eye(3)}},
        "sensor_data": {"base_camera": {"rgb": np.zeros((4, 4, 3), np.uint8)}},
    }
    found = maniskill.flat(seen)
    assert set(found) == {"agent/qpos", "agent/qvel", "extra/goal_pos", "extra/is_grasped", "base_camera"}
    assert [name for name, one in found.items() if is_picture(one)] == ["base_camera"]
    assert set(maniskill.flat(np.zeros(5))) == {"state"}  # observation mode state


def test_what_is_missing_is_said(monkeypatch):
    with pytest.raises(ValueError, match="has pictures of its own size: leave out the size"):
        environment("maniskill:PickCube-v1", image_size=32)
    monkeypatch.setitem(sys.modules, "mani_skill", None)
    with pytest.raises(UsageError, match=r"maniskill:PickCube-v1: ManiSkill cannot be imported .*: pip install"):
        environment("maniskill:PickCube-v1")
