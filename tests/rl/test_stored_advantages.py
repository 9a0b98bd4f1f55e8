"""Advantages of stored steps, against the sum of rewards written out; the indicator against numpy's quantiles."""

import numpy as np
import pytest

from openpi_train.rl.stored_advantages import better_steps, lookahead_advantages

LENGTHS, IS_SUCCESS = [5, 1, 7], [True, True, False]
ENDS = np.cumsum(LENGTHS)
VALUES = np.random.default_rng(0).uniform(-1, 0, sum(LENGTHS))
FAILURE = 10.0


def rewards_of(length, success):
    """-1 for each step but the last, which has nothing or the cost of a failure."""
    return [-1.0] * (length - 1) + [0.0 if success else -FAILURE]


def by_hand(lookahead):
    found, start = [], 0
    for length, success in zip(LENGTHS, IS_SUCCESS, strict=True):
        rewards, values = rewards_of(length, success), VALUES[start : start + length]
        for step in range(length):
            end = length if lookahead is None else min(length, step + lookahead)
            later = values[end] if end < length else 0.0
            found.append(sum(rewards[step:end]) + later - values[step])
        start += length
    return found


@pytest.mark.parametrize("lookahead", [1, 3, 100, None])
def test_an_advantage_is_the_sum_of_rewards_and_the_next_value(lookahead):
    returns = np.concatenate([np.cumsum(rewards_of(*one)[::-1])[::-1] for one in zip(LENGTHS, IS_SUCCESS, strict=True)])
    np.testing.assert_allclose(lookahead_advantages(returns, VALUES, ENDS, lookahead), by_hand(lookahead), atol=1e-12)


def test_a_share_of_each_task_is_better_and_marked_steps_always_are():
    random = np.random.default_rng(0)
    advantages = [random.normal(size=200), random.normal(size=100) + 3]
    tasks = [np.repeat(["lift", "push"], 100), np.full(100, "lift")]
    always = [np.zeros(200, bool), np.arange(100) < 20]
    always[0][150] = True
    found = better_steps(advantages, tasks, always, 0.3)
    lift = np.concatenate([advantages[0][:100], advantages[1][20:]])
    push = np.delete(advantages[0][100:], 50)
    limits = np.sort(lift)[::-1], np.sort(push)[::-1]
    # 180 and 99 steps are judged: the 54 and the 29.7 greatest.
    assert limits[0][54] <= found[0].thresholds["lift"] <= limits[0][53]
    assert limits[1][30] <= found[0].thresholds["push"] <= limits[1][29]
    better = np.concatenate([found[0].is_better[:100], found[1].is_better[20:]])
    np.testing.assert_array_equal(better, lift > found[0].thresholds["lift"])
    assert better.sum() == 54 and found[1].is_better[:20].all() and found[0].is_better[150]
    assert found[1].thresholds == {"lift": found[0].thresholds["lift"]}
