"""Gymnasium's environments: their episodes, what is observed, and what cannot be used."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from openpi_train.envs.gym_env import GymEnv
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


def test_episodes_are_functions_of_their_keys_and_actions_are_clipped():
    def outcome(keys, step):
        found = rollout(lambda seen, _: np.full((len(keys), 2, 1), step), LINE, keys, TASKS[: len(keys)], execute=2)
        return found.success.tolist(), found.steps.tolist()

    assert outcome(KEYS, 50.0) == outcome(KEYS, 1.0) == ([True] * 3, [3] * 3)
    # Ended by its own limit of five steps.
    assert outcome(KEYS, 0.1) == ([False] * 3, [100] * 3)
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
    with pytest.raises(UsageError, match="no entry 'is_success' \\(it has solved\\): set success_entry"):
        env = dataclasses.replace(env, success_entry="is_success")
        env.step(env.reset(KEYS, TASKS), np.ones((3, 1)))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (f"{FILE}:blind", r"no vector for the state: eye \(2, 2, 3\)"),
        (f"{FILE}:discrete", "needed is a Box of one axis"),
        (f"{FILE}:nothing", "has no function 'nothing'"),
        ("absent.py:make", "there is no file absent.py"),
        ("Pendulum-v77", "Pendulum"),
    ],
)
def test_what_no_policy_can_act_in_is_refused(source, message):
    with pytest.raises(UsageError, match=message):
        _ = GymEnv(source=source).action_dim


def test_gymnasiums_own_are_found_by_name():
    env = environment("gym:Pendulum-v1")
    assert isinstance(env, ProcessEnv)  # it may end or hang
    assert (env.action_dim, env.state_dim, env.cameras, env.tasks) == (1, 3, (), ("Pendulum-v1",))
    assert environment("gym:my_env.py:make") == environment("my_env.py:make") != environment("my_env.py:other")
    with pytest.raises(ValueError, match="leave out the size"):
        environment("gym:Pendulum-v1", image_size=32)
