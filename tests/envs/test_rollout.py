"""Closed-loop rollouts: bookkeeping on an environment with a known answer, and the tabletop itself."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from openpi_train import keys as row_randomness
from openpi_train.envs import tabletop_env
from openpi_train.envs.env import Env, EnvObservation
from openpi_train.envs.rollout import rollout
from openpi_train.envs.tabletop_env import TabletopEnv
from openpi_train.envs.tabletop_expert import expert


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counter(Env):
    """A world outside JAX: the state is a sum of actions, task k succeeds when it reaches k."""

    cameras = ()
    action_dim = 1
    state_dim = 1
    control_hz = 1.0
    max_steps = 10

    @property
    def tasks(self):
        return tuple(f"reach_{number}" for number in range(20))

    def instruction(self, task):
        return f"reach {task}"

    def reset(self, keys, tasks):
        return np.zeros(len(tasks)), np.asarray(tasks)

    def step(self, states, actions):
        return states[0] + np.asarray(actions)[:, 0], states[1]

    def observe(self, states):
        return EnvObservation(
            images={}, state=jnp.asarray(states[0][:, None], jnp.float32), task=jnp.asarray(states[1])
        )

    def success(self, states):
        return jnp.asarray(states[0] >= states[1])


def keys_of(count, seed=0):
    return jax.random.split(jax.random.key(seed), count)


def test_success_and_its_step_are_those_of_the_known_answer():
    calls = []

    def policy(observation, keys):
        calls.append(np.asarray(observation.state)[:, 0].tolist())
        return np.ones((3, 4, 1))

    outcome = rollout(policy, Counter(), keys_of(3), np.array([5, 10, 11]), execute=3)
    assert outcome.success.tolist() == [True, True, False]
    assert outcome.steps.tolist() == [5, 10, 10]
    # Asked anew after every 3 steps; the last chunk is cut short.
    assert calls == [[0] * 3, [3] * 3, [6] * 3, [9] * 3]


def test_a_request_to_stop_is_heard_before_the_next_chunk():
    answers, calls = iter([False, False, True]), []

    def policy(observation, keys):
        calls.append(len(keys))
        return np.ones((1, 2, 1))

    stop = answers.__next__
    assert rollout(policy, Counter(), keys_of(1), np.array([9]), execute=2, stop_requested=stop) is None
    assert calls == [1, 1]


def test_it_stops_once_every_episode_has_succeeded():
    calls = []

    def policy(observation, keys):
        calls.append(1)
        return np.ones((2, 1, 1))

    rollout(policy, Counter(), keys_of(2), np.array([2, 3]), execute=1)
    assert len(calls) == 3


def test_the_environment_rests_once_every_episode_has_succeeded_while_others_are_waited_for():
    """Two chunks of three actions, the first of which succeeds with its second action; other processes go on."""
    stepped, seen = [], []

    class Noted(Counter):
        def step(self, states, actions):
            stepped.append(1)
            return super().step(states, actions)

    def policy(observation, keys):
        seen.append((np.asarray(observation.state)[:, 0].tolist(), np.asarray(jax.random.key_data(keys)).tolist()))
        return np.ones((2, 3, 1))

    waited, keys = iter([False, False, True]), keys_of(2)
    how = {"execute": 3, "all_done": lambda _: next(waited)}
    outcome = rollout(policy, Noted(), keys, np.array([1, 2]), **how)
    assert outcome.steps.tolist() == [1, 2] and outcome.success.all() and len(stepped) == 2
    # The second query is that of the third control step.
    at = row_randomness.for_purpose(keys, "env/policy")
    expected = jax.vmap(jax.random.fold_in, in_axes=(0, None))(at, 3)
    assert len(seen) == 2 and seen[1][1] == np.asarray(jax.random.key_data(expected)).tolist()


def test_a_rows_randomness_does_not_depend_on_its_batch():
    seen = {}

    def policy(name):
        def act(observation, keys):
            draws = jax.vmap(lambda key: jax.random.uniform(key, (1, 1)))(keys)
            seen.setdefault(name, []).append(np.asarray(draws)[-1, 0, 0])
            return draws

        return act

    keys = keys_of(3)
    rollout(policy("batch"), Counter(), keys, np.array([12, 12, 12]), execute=1, max_steps=4)
    rollout(policy("alone"), Counter(), keys[2:], np.array([12]), execute=1, max_steps=4)
    assert seen["batch"] == seen["alone"]
    assert len(set(seen["alone"])) == 4


class Somewhere(Counter):
    """Episodes begin where their key says."""

    def reset(self, keys, tasks):
        return np.asarray(jax.vmap(jax.random.uniform)(keys)), np.asarray(tasks)


def test_rollouts_from_one_state_differ_by_the_policys_keys_alone():
    def once(*keys, **more):
        draws, starts = [], []

        def act(observation, keys):
            starts.append(np.asarray(observation.state)[:, 0].tolist())
            draws.append(np.asarray(jax.vmap(lambda key: jax.random.uniform(key, (1, 1)))(keys))[:, 0, 0].tolist())
            return np.zeros((2, 1, 1))

        rollout(act, Somewhere(), *keys, np.array([12, 12]), execute=1, max_steps=3, **more)
        return starts[0], draws

    first, other = keys_of(2), keys_of(2, seed=1)
    start, draws = once(first)
    assert once(first, policy_keys=first) == (start, draws)
    assert once(first, policy_keys=other) == (start, once(other)[1])
    assert once(other, policy_keys=first) == (once(other)[0], draws)
    assert start != once(other)[0] and draws != once(other)[1]


def test_chunks_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"shape \(2, 1, 7\); 2 episodes need \(2, horizon, 1\)"):
        rollout(lambda *_: np.ones((2, 1, 7)), Counter(), keys_of(2), np.array([5, 5]), execute=1)
    with pytest.raises(ValueError, match="execute 5 is not between 1 and the policy's chunk length 4"):
        rollout(lambda *_: np.ones((2, 4, 1)), Counter(), keys_of(2), np.array([5, 5]), execute=5)


@pytest.fixture(scope="module")
def recorded():
    """The expert's undisturbed commands in the scenes that a rollout with these keys starts from."""
    env = TabletopEnv()
    keys, tasks = keys_of(56, seed=4), np.tile(np.arange(len(env.tasks)), 4)
    scenes = env.reset(row_randomness.for_purpose(keys, "env/reset"), jnp.asarray(tasks))

    def one_step(scenes, _):
        commands = jax.vmap(expert)(scenes)
        return jax.vmap(tabletop_env.step)(scenes, commands), commands

    commands = jax.jit(lambda: jax.lax.scan(one_step, scenes, length=env.max_steps)[1])()
    return env, keys, tasks, np.asarray(commands).swapaxes(0, 1)


@pytest.mark.slow
def test_replayed_commands_solve_the_tabletop_and_idleness_does_not(recorded):
    env, keys, tasks, commands = recorded
    position = iter(range(0, env.max_steps, 8))
    replay = rollout(lambda *_: commands[:, (start := next(position)) : start + 8], env, keys, tasks, execute=8)
    assert replay.success.mean() >= 0.95
    assert replay.steps[replay.success].max() < env.max_steps
    idle = rollout(lambda *_: np.zeros((len(tasks), 4, 7)), env, keys, tasks, execute=4, max_steps=16)
    assert not idle.success.any()
    assert (idle.steps == 16).all()
