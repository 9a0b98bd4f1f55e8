"""Scripted experts on the real simulators: they succeed from any initial state, also when they are disturbed."""

import dataclasses
import importlib.util

import jax
import numpy as np
import pytest

from openpi_train.envs.named_envs import environment
from openpi_train.tools.collect import collect

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.skipif(not importlib.util.find_spec("gymnasium_robotics"), reason="gymnasium-robotics is missing"),
]


@pytest.mark.parametrize(("task", "fewest"), [("reach", 8), ("push", 7)])
def test_fetchs_expert_is_at_its_goal_at_the_last_step_although_it_is_disturbed(task, fewest):
    """Gymnasium's own `is_success` at step 50, which is how these tasks are judged."""
    env = environment(f"fetch:{task}").env
    states = env.reset(jax.random.split(jax.random.key(7), 8), np.zeros(8, int))
    for step in range(50):
        commands, carried_out = env.demonstrate(states, jax.random.split(jax.random.key(step), 8))
        assert commands.shape == (8, 4) and np.abs(carried_out).max() <= 1
        assert not commands[:, 3].any() and not carried_out[:, 3].any()  # the fingers have no part in it
        assert step or not np.array_equal(commands, carried_out)
        states = env.step(states, carried_out)
    assert env.success(states).sum() >= fewest


def test_demonstrations_of_fetch_are_whole_episodes_with_the_goal_in_the_state(tmp_path):
    (told,) = collect(environment("fetch:reach").env, tmp_path / "reach.zarr", episodes_per_task=2)
    assert (told.kept, told.attempts) == (2, 2)
    import zarr

    store = zarr.open_group(str(tmp_path / "reach.zarr"), mode="r")
    states, actions = np.asarray(store["data/state"]), np.asarray(store["data/action"])
    assert states.shape == (100, 16) and actions.shape == (100, 4)
    # Achieved and desired goal come first; the last observation is at the goal.
    assert np.linalg.norm(states[[49, 99], :3] - states[[49, 99], 3:6], axis=1).max() < 0.05
    # The command is the way to the goal in units of 5 cm, at most 1.
    way = np.clip((states[:, 3:6] - states[:, :3]) / 0.05, -1, 1)
    np.testing.assert_allclose(actions[:, :3], way, atol=1e-5)


def test_other_tasks_have_no_expert():
    env = environment("fetch:pick_and_place").env
    assert not env.has_expert and environment("fetch:push").env.has_expert
    assert dataclasses.replace(env, source="gymnasium_robotics:FetchReach-v4").has_expert
