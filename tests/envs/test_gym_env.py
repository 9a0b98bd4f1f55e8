"""Gymnasium's environments: their episodes, what is observed, and what cannot be used."""

import dataclasses
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from openpi_train.envs import env_pool
from openpi_train.envs.closed_loop import ClosedLoop, evaluate
from openpi_train.envs.gym_env import GymEnv
from openpi_train.envs.gym_source import keywords
from openpi_train.envs.in_processes import ProcessEnv
from openpi_train.envs.named_envs import environment
from openpi_train.envs.rollout import rollout
from openpi_train.runtime.exits import UsageError

FILE = Path(__file__).parent / "walking_gym.py"
LINE = GymEnv(source=f"{FILE}:line", prompt="walk")
KEYS, TASKS = jax.random.split(jax.random.key(0), 3), np.zeros(3, int)


def test_an_observation_has_the_vectors_in_order_of_their_names_and_the_pictures():
    states = LINE.step(LINE.reset(KEYS, TASKS), np.ones((3, 1)))
    seen = LINE.observe(states)
    assert (LINE.cameras, LINE.state_dim, LINE.action_dim, LINE.tasks) == (("eye",), 2, 1, ("walking_gym",))
    np.testing.assert_allclose(seen.state[:, 1] - seen.state[:, 0], 1, rtol=1e-6)
    assert LINE.has_reward and LINE.reward(states).tolist() == [7.0] * 3
    assert (seen.images["eye"] == 1).all() and len(np.unique(seen.state)) == 6


def test_episodes_are_functions_of_their_keys_and_actions_are_clipped_only_if_asked():
    def outcome(keys, step, env=LINE):
        found = rollout(lambda seen, _: np.full((len(keys), 2, 1), step), env, keys, TASKS[: len(keys)], execute=2)
        return found.success.tolist(), found.steps.tolist(), found.beyond.tolist()

    clipped = dataclasses.replace(LINE, clip=True)
    assert outcome(KEYS, 1.0) == outcome(KEYS, 1.0, clipped) == ([True] * 3, [3] * 3, [0.0])
    assert outcome(KEYS, 50.0) == ([True] * 3, [1] * 3, [1.0])
    assert outcome(KEYS, 50.0, clipped) == ([True] * 3, [3] * 3, [1.0])
    # Ended by its own limit of five steps.
    assert outcome(KEYS, 0.1) == ([False] * 3, [100] * 3, [0.0])
    starts = [np.asarray(LINE.observe(LINE.reset(keys, TASKS[: len(keys)])).state) for keys in (KEYS, KEYS[1:])]
    np.testing.assert_array_equal(starts[0][1:], starts[1])


def test_only_the_newest_states_go_on_and_simulators_are_used_again():
    first = LINE.reset(KEYS, TASKS)
    LINE.step(first, np.ones((3, 1)))
    with pytest.raises(RuntimeError, match="after 0 control steps of 1"):
        LINE.step(first, np.ones((3, 1)))
    used = {id(one) for one in first.simulators}
    del first
    assert {id(one) for one in LINE.reset(KEYS, TASKS).simulators} & used


def test_success_may_be_where_it_ends_by_itself():
    env = GymEnv(source=f"{FILE}:silent", success_entry="terminated")
    assert rollout(lambda *_: np.ones((3, 1, 1)), env, KEYS, TASKS, execute=1).success.all()
    env = dataclasses.replace(env, success_entry=None)
    with pytest.raises(UsageError, match=r"no entry 'is_success' or 'success' \(it has solved\): set --env.success"):
        _ = env.cameras  # before any episode


def test_what_an_environment_says_of_itself_is_used_and_may_be_set():
    env = GymEnv(source=f"{FILE}:arms")
    assert (env.max_steps, env.control_hz, env.instruction(0)) == (7, 25.0, "walk on")
    assert (env.cameras, env.state_dim) == (("grey", "side", "top"), 3)
    seen = env.observe(env.reset(KEYS, TASKS))
    assert {name: one.shape for name, one in seen.images.items()} == dict.fromkeys(env.cameras, (3, 2, 3, 3)) | {
        "side": (3, 3, 2, 3)
    }
    assert {name: set(one.ravel().tolist()) for name, one in seen.images.items()} == {
        "grey": {9},
        "side": {51},
        "top": {7},
    }
    np.testing.assert_array_equal(seen.state[:, 0], [1.0] * 3)  # agent/holds, agent/pos, goal
    np.testing.assert_array_equal(seen.state[:, 2], [3.0] * 3)
    settings = {"rate": 5.0, "prompt": "go", "state": ("goal", "agent/pos"), "cameras": ("cam_high=top",)}
    changed = environment(f"{FILE}:arms", settings=settings)
    assert (changed.control_hz, changed.instruction(0), changed.state_dim) == (5.0, "go", 2)
    assert changed.cameras == ("cam_high", "grey", "side")
    assert changed.camera_of("observation.images.cam_high") == "cam_high" and changed.limited_to(3).max_steps == 3


def test_a_policy_that_does_not_see_the_goal_is_told(caplog):
    _ = GymEnv(source=f"{FILE}:arms", state_entries=("agent/pos",), success_entry="success").cameras
    assert "the policy does not see goal: add it to --env.state" in caplog.text
    assert "no picture and no vector, not seen by the policy: depth" in caplog.text


def test_success_may_count_at_the_last_step_only():
    """There and back again: beyond the goal at the third step, before it at the last."""
    steps = iter([1.0] * 3 + [-1.0] * 2)
    env = GymEnv(source=f"{FILE}:stays", success_at="last", step_limit=5)
    assert not rollout(lambda *_: np.full((3, 1, 1), next(steps)), env, KEYS, TASKS, execute=1).success.any()
    found = rollout(lambda *_: np.full((3, 1, 1), 1.0), env, KEYS, TASKS, execute=1, max_steps=4)
    assert found.success.all() and found.steps.tolist() == [4] * 3


def test_the_simulator_that_was_idle_longest_is_closed_first():
    env_pool.close_idle()
    other, third = GymEnv(source=f"{FILE}:arms"), GymEnv(source=f"{FILE}:stays")
    _ = LINE.cameras, other.cameras, third.cameras
    closed = sys.modules["walking_gym"].CLOSED
    running = [LINE.reset(KEYS[:1], TASKS[:1]), other.reset(KEYS[:1], TASKS[:1])]
    running.pop(0)  # of LINE, idle from now on
    running.pop(0)
    closed.clear()
    _ = third.reset(KEYS[:1], TASKS[:1])
    assert [type(one).__name__ for one in closed] == ["Line"]


def test_the_share_of_actions_beyond_the_bounds_is_told_once(caplog):
    config = ClosedLoop(env=LINE, episodes_per_task=3)
    _ = evaluate(lambda: lambda seen, keys: np.full((len(keys), 1, 1), 2.0), config, execute=1, batch_size=1)
    (told,) = [record.message for record in caplog.records if "beyond the bounds" in record.message]
    assert "(dim 0: 100%)" in told and "--env.clip clips them" in told


def test_idle_simulators_are_closed_where_others_are_needed():
    env_pool.close_idle()
    other = GymEnv(source=f"{FILE}:arms")
    _ = LINE.cameras, other.cameras
    closed = sys.modules["walking_gym"].CLOSED
    closed.clear()
    for env in (LINE, other, LINE):
        states = env.reset(KEYS, TASKS)
        del states
    assert [type(one).__name__ for one in closed] == ["Line"] * 3 + ["Arms"] * 3
    assert len(env_pool._IDLE) == 3
    env_pool.close_idle()
    assert len(closed) == 9 and not env_pool._IDLE


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"state": ("agent/pos", "top")}, r"the state cannot have 'top'; it can have agent/holds, agent/pos, goal"),
        ({"cameras": ("left",)}, r"--env.cameras left: it is NAME=ENTRY, .* pixels/top \[2, 3, 3\]"),
        ({"make": ("size",)}, r"--env.make size: it is NAME=VALUE"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(UsageError, match=message):
        _ = environment(f"{FILE}:arms", settings=settings).cameras


def test_only_gymnasiums_environments_have_settings():
    with pytest.raises(UsageError, match=r"--env.success-at: for environments of Gymnasium, and TabletopEnv is none"):
        environment("tabletop", settings={"success_at": "last"})


def test_arguments_are_given_to_what_makes_it():
    made = GymEnv(source=f"{FILE}:line", make=("told=is_success",))
    assert made.state_dim == 2 and keywords(("a=3", "b=(1, 2)", "c=pixels", "d=x=y")) == {
        "a": 3,
        "b": (1, 2),
        "c": "pixels",
        "d": "x=y",
    }


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (f"{FILE}:blind", r"no vector for the state: eye \[2, 2, 3\]"),
        (f"{FILE}:discrete", "needed is a Box of one axis"),
        (f"{FILE}:nothing", "has no function 'nothing'"),
        ("absent.py:make", "there is no file absent.py"),
        ("nothing/Here-v0", "Namespace nothing not found. .* give its module, too"),
        ("no_such_module:Here-v0", "No module named 'no_such_module'"),
        ("Pendulum-v77", "Pendulum"),
    ],
)
def test_what_no_policy_can_act_in_is_refused(source, message):
    with pytest.raises(UsageError, match=message):
        _ = GymEnv(source=source).action_dim


def test_gymnasiums_own_are_found_by_name():
    env = environment("gym:Pendulum-v1", settings={"success": "terminated"})
    assert isinstance(env, ProcessEnv)  # it may end or hang
    assert (env.action_dim, env.state_dim, env.cameras, env.tasks) == (1, 3, (), ("Pendulum-v1",))
    assert environment("gym:my_env.py:make") == environment("my_env.py:make") != environment("my_env.py:other")
    with pytest.raises(ValueError, match="leave out the size"):
        environment("gym:Pendulum-v1", image_size=32)
