"""Environments by the names of the command line."""

import pytest

from openpi_train.envs.named_envs import environment
from openpi_train.runtime.exits import UsageError


def test_one_task_is_named_on_the_command_line():
    assert environment("metaworld:drawer-close-v3").tasks == environment("metaworld:drawer-close").tasks
    assert environment("metaworld:drawer-close").tasks == ("drawer-close",)
    with pytest.raises(ValueError, match="did you mean drawer-close"):
        environment("metaworld:drawer_close")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pusht:keypoint", "there is no pusht:keypoint; did you mean pusht:keypoints"),
        ("aloha:transfer", "did you mean aloha:transfer_cube"),
        ("fetch:fly", "There are fetch:reach, fetch:push, fetch:slide, fetch:pick_and_place"),
    ],
)
def test_a_task_that_is_not_there_gets_the_closest_one(name, message):
    with pytest.raises(UsageError, match=message):
        environment(name)


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr("openpi_train.envs.gym_tasks.importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"aloha:insertion needs gym-aloha: pip install 'openpi_train\[aloha\]'"):
        environment("aloha:insertion")
