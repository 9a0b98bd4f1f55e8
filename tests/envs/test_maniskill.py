"""ManiSkill's tasks, with a stand-in that has its interface."""

import sys
from pathlib import Path

import gymnasium
import jax
import numpy as np
import pytest

from openpi_train import keys as row_randomness
from openpi_train.envs import env_pool, gym_env, maniskill
from openpi_train.envs.named_envs import environment
from openpi_train.envs.rollout import rollout
from openpi_train.runtime.exits import UsageError

STAND_INS = Path(__file__).parent / "stand_ins"
KEYS, TASKS = jax.random.split(jax.random.key(0), 3), np.zeros(3, int)


def forget():
    gym_env._sizes.cache_clear()
    env_pool.forget_idle()
    gymnasium.registry.pop("PickCube-v1", None)
    for name in [name for name in sys.modules if name.partition(".")[0] == "mani_skill"]:
        del sys.modules[name]


@pytest.fixture
def pick_cube(monkeypatch):
    """The environment of the command line, without the processes around it."""
    forget()
    monkeypatch.syspath_prepend(STAND_INS)
    yield environment("maniskill:PickCube-v1").env
    forget()


def test_a_task_is_an_environment_with_its_own_names_and_limit(pick_cube):
    assert pick_cube.tasks == ("PickCube-v1",)
    assert pick_cube.instruction(0) == "pick up the cube and bring it to the goal"
    assert (pick_cube.max_steps, pick_cube.control_hz, pick_cube.cameras) == (50, 20.0, ("base_camera",))
    assert (pick_cube.action_dim, pick_cube.state_dim) == (7, 9)


def test_its_episodes_are_functions_of_keys_and_succeed_as_it_says(pick_cube):
    seen = []

    def policy(observation, keys):
        seen.append(observation)
        return np.tile([0.3] + [0.0] * 6, (len(keys), 2, 1))

    outcome = rollout(policy, pick_cube, KEYS, TASKS, execute=2)
    starts = seen[0].state[:, 0]
    assert len(set(starts.tolist())) == 3 and outcome.success.all()
    assert outcome.steps.tolist() == [int(np.floor((1 - start) / 0.3)) + 1 for start in starts]
    assert (seen[1].images["base_camera"] == 2).all() and seen[1].images["base_camera"].shape == (3, 4, 4, 3)
    states = pick_cube.step(pick_cube.reset(KEYS, TASKS), np.zeros((3, 7)))
    assert pick_cube.reward(states).tolist() == [0.5] * 3
    again = pick_cube.reset(row_randomness.for_purpose(KEYS, "env/reset"), TASKS)
    np.testing.assert_array_equal(pick_cube.observe(again).state[:, 0], starts)


def test_a_task_without_an_instruction_of_ours_has_its_name(pick_cube):
    gymnasium.register("StirThePot-v3", entry_point=object)
    assert maniskill.settings("StirThePot-v3") == {
        "prompt": "stir the pot",
        "success_entry": "success",
        "step_limit": 100,
        "rate_hz": 20.0,
    }
    gymnasium.registry.pop("StirThePot-v3")


def test_what_is_missing_is_said(pick_cube, monkeypatch):
    with pytest.raises(UsageError, match="maniskill:PickSphere-v9: "):
        environment("maniskill:PickSphere-v9")
    with pytest.raises(ValueError, match="has pictures of its own size: leave out the size"):
        environment("maniskill:PickCube-v1", image_size=32)
    forget()
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(STAND_INS)])
    with pytest.raises(UsageError, match=r"maniskill:PickCube-v1: ManiSkill cannot be imported .*: pip install"):
        environment("maniskill:PickCube-v1")
