"""Which initial states are drawn when."""

import jax
import numpy as np
import pytest

from openpi_train.envs.closed_loop import ClosedLoop, episode_keys
from openpi_train.envs.tabletop_env import TabletopEnv
from openpi_train.rl.initial_states import InitialStates

TASKS = ("reach", "push", "pick")


def words(keys):
    return [tuple(key) for key in np.asarray(jax.random.key_data(keys)).tolist()]


def test_a_pass_has_every_state_once_and_another_order_than_the_next():
    states = InitialStates(TASKS, 4, seed=1)
    passes = [[states.prompt_id(draw) for draw in range(first, first + 12)] for first in (0, 12)]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(12)) and passes[0] != passes[1]
    keys = words(states.reset_keys(np.arange(24)))
    by_context = {states.prompt_id(draw): keys[draw] for draw in range(12)}
    assert len(set(keys)) == 12 and all(by_context[states.prompt_id(draw)] == keys[draw] for draw in range(24))
    assert all(states.prompt_id(draw) % 3 == states.task(draw) for draw in range(24))


def test_without_a_number_of_states_every_draw_is_new_and_tasks_are_as_frequent():
    states = InitialStates(TASKS, None, seed=1)
    assert len(set(words(states.reset_keys(np.arange(60))))) == 60
    for first in range(0, 60, 3):
        assert sorted(states.task(draw) for draw in range(first, first + 3)) == [0, 1, 2]
    assert [states.prompt_id(draw) for draw in range(9)] == [states.task(draw) for draw in range(9)]


@pytest.mark.parametrize("number", [4, None])
def test_noise_is_new_in_every_rollout_at_every_draw_and_of_the_runs_seed(number):
    one, other = InitialStates(TASKS, number, seed=1), InitialStates(TASKS, number, seed=2)
    draws, rollouts = np.repeat(np.arange(24), 4), np.tile(np.arange(4), 24)
    keys = [words(states.noise_keys(draws, rollouts)) for states in (one, other)]
    resets = [words(states.reset_keys(np.arange(24))) for states in (one, other)]
    assert len({*keys[0], *keys[1]}) == 192 and not {*keys[0]} & {*resets[0]} and not {*resets[0]} & {*resets[1]}


@pytest.mark.parametrize("number", [4, None])
def test_states_and_noise_of_rl_are_not_those_of_evaluations(number):
    """Both name tasks by the same words and number what they begin from 0 on, often with the same seed."""
    env = TabletopEnv()
    evaluated = {key for seed in (0, 1) for key in words(episode_keys(ClosedLoop(env=env, seed=seed), np.arange(60)))}
    assert len(evaluated) == 120
    for seed in (0, 1):
        states, draws = InitialStates(env.tasks, number, seed=seed), np.arange(60)
        assert not evaluated & {*words(states.reset_keys(draws)), *words(states.noise_keys(draws, draws % 4))}
