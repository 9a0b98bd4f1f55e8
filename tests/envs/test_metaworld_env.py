"""Meta-World behind our `Env`: the same keys are the same episodes, experts succeed, nothing silent; and its robot."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("metaworld", reason="Meta-World is not installed: pip install 'openpi_train[sim]'")

from openpi_train import keys as row_randomness
from openpi_train.envs import metaworld_env, metaworld_render
from openpi_train.envs.metaworld_env import MetaWorldEnv, with_all_tasks
from openpi_train.envs.named_envs import environment
from openpi_train.envs.rollout import rollout
from openpi_train.robots.metaworld import MetaWorld

pytestmark = [pytest.mark.sim, pytest.mark.slow]
ENV = MetaWorldEnv()
TASKS = np.arange(len(ENV.tasks))


def keys(count, seed=0):
    return row_randomness.row_keys(seed, 0, jnp.arange(count))


def walk(states, actions, env=ENV):
    for action in actions:
        states = env.step(states, np.broadcast_to(action, (len(states.success), 4)))
    return states


def test_the_table_of_instructions_has_every_task_of_the_package():
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS

    assert {f"{name}-v3" for name in with_all_tasks().tasks} == set(ALL_V3_ENVIRONMENTS)
    assert environment("metaworld") == with_all_tasks()
    assert ENV.instruction(1) == "press the button"


def test_an_episode_is_a_function_of_its_key_and_actions_whatever_was_done_before():
    actions = np.random.default_rng(0).uniform(-1, 1, (5, 4))
    first = walk(ENV.reset(keys(2), np.array([0, 4])), actions)
    found = first.observations
    simulators = {id(one) for one in first.simulators}
    del first
    other = walk(ENV.reset(keys(2, seed=1), np.array([4, 0])), actions)  # with the simulators of the batch before
    assert {id(one) for one in other.simulators} == simulators
    assert not np.array_equal(other.observations[::-1], found)
    again = walk(ENV.reset(keys(3), np.array([0, 4, 4])), actions)
    assert np.array_equal(again.observations[:2], found)
    shown = ENV.for_demonstrations()
    assert (ENV.split, shown.split) == ("held_out", "train")
    assert (shown.reset(keys(2), np.array([0, 4])).observations[:, -3:] != found[:, -3:]).any(axis=1).all()


def test_experts_reach_every_goal_and_an_episode_ends_with_its_success():
    states = ENV.reset(keys(len(TASKS)), TASKS)
    assert not ENV.success(states).any()
    for number in range(ENV.max_steps):
        commands, carried_out = ENV.demonstrate(states, keys(len(TASKS), seed=number))
        assert np.abs(carried_out).max() <= 1 and (commands != carried_out).any()
        states = ENV.step(states, carried_out)
        if states.success.all():
            break
    assert ENV.success(states).all() and 30 < states.num_steps.min() < states.num_steps.max() < 200
    after = walk(states, np.ones((2, 4)))
    assert np.array_equal(after.observations, states.observations)


def test_rollout_counts_steps_to_the_success():
    def expert(observation, keys):
        states = np.asarray(observation.state, np.float64)  # [hand, ..., goal]
        motion = 10 * (states[:, -3:] - states[:, :3])
        return np.concatenate([motion, np.zeros((len(states), 1))], axis=1)[:, None]

    outcome = rollout(expert, ENV, keys(2), np.zeros(2, int), execute=1)
    assert outcome is not None and outcome.success.all() and outcome.steps.max() < 100
    assert outcome.steps.tolist() == outcome.states.num_steps.tolist()


def test_states_that_were_stepped_before_are_refused():
    states = ENV.reset(keys(1), np.array([0]))
    ENV.step(states, np.ones((1, 4)))
    with pytest.raises(RuntimeError, match="already stepped, and a simulator cannot go back: keep the newest states"):
        ENV.step(states, np.ones((1, 4)))


@pytest.mark.parametrize(
    ("tasks", "message"), [(("reech",), "has no task reech; it has assembly, "), ((), "task_list is empty")]
)
def test_tasks_that_there_are_not_are_named(tasks, message):
    with pytest.raises(ValueError, match=message):
        MetaWorldEnv(task_list=tasks)
    with pytest.raises(ValueError, match=r"no environment 'metawrld'; did you mean metaworld\? There are metaworld, t"):
        environment("metawrld")


def test_pictures_are_drawn_where_they_can_be():
    if metaworld_render.why_not():
        pytest.skip(metaworld_render.why_not())
    env = dataclasses.replace(ENV, image_size=32)
    states = env.reset(keys(2), np.array([0, 2]))
    pictures = env.observe(states).images["corner2"]
    assert pictures.shape == (2, 32, 32, 3) and pictures.dtype == np.uint8 and pictures.std() > 10
    # The arm is red, and hangs from the left over the table.
    red = (pictures[0, ..., 0] > 90) & (pictures[0, ..., 1] < 40)
    assert 10 < red.sum() < 300 and red.mean(axis=0).argmax() < 20 and red[16:].any()
    shown = ENV.pictures(ENV.reset(keys(2), np.array([0, 2])), np.array([1]))["corner2"]
    assert shown.shape == (1, 240, 240, 3)


def test_without_opengl_states_are_all_there_is(monkeypatch, caplog):
    monkeypatch.setattr(metaworld_render, "_BACKENDS", ("no_such_backend",))
    caches = (metaworld_render.why_not, metaworld_env._tell_why_not)
    for cache in caches:
        cache.cache_clear()
    states = ENV.reset(keys(1), np.array([0]))
    assert ENV.observe(states).images == {} and ENV.observe(states).state.shape == (1, 39)
    assert [ENV.pictures(states, np.array([0])) for _ in range(2)] == [{}, {}]
    assert caplog.text.count("renders no pictures: this machine cannot render without a display (no_such_backend") == 1
    with pytest.raises(RuntimeError, match="install libegl1 or libosmesa6, or omit the environment's image_size"):
        dataclasses.replace(ENV, image_size=48).observe(states)
    for cache in caches:
        cache.cache_clear()


def test_the_robot_has_the_environments_dims_and_both_directions():
    robot = MetaWorld()
    assert (len(robot.state_names), len(robot.action_names)) == (ENV.state_dim, ENV.action_dim)
    assert robot.control_hz == ENV.control_hz and not robot.cameras
    # Meta-World's order: hand, opening, objects, the same a step ago, goal.
    states = walk(ENV.reset(keys(1), np.array([4])), np.ones((3, 4)))
    (observed,) = ENV.observe(states).state
    named = dict(zip(robot.state_names, observed.tolist(), strict=True))
    simulator = states.simulators[0].env
    hand, goal = simulator.get_endeff_pos(), simulator._target_pos
    assert [named[f"hand_{axis}_m"] for axis in "xyz"] == pytest.approx(hand.tolist(), abs=1e-6)
    assert [named[f"goal_{axis}_m"] for axis in "xyz"] == pytest.approx(goal.tolist(), abs=1e-6)
    puck = simulator.get_body_com("obj").tolist()
    assert [named[f"object_1_{axis}_m"] for axis in "xyz"] == pytest.approx(puck, abs=1e-6)
    recorded = {"state": np.ones((3, 39)), "action": np.ones((3, 4))}
    steps = robot.read(recorded, np.array([3]))
    state, actions = robot.to_model(steps.state, steps.actions[:, None])
    assert actions is not None and np.array_equal(robot.from_model(actions, state), steps.actions[:, None])
    with pytest.raises(ValueError, match=r"MetaWorld robot has 39 state dims .* the dataset gives 38"):
        robot.read(recorded | {"state": np.ones((3, 38))}, np.array([3]))
