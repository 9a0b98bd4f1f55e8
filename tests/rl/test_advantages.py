"""Advantages against closed forms, published numbers (ALGORITHMS, A1 to A5) and exact expectations."""

import itertools

import numpy as np
import pytest

from openpi_train.rl.advantages import (
    adapted_weight,
    explained_variance,
    generalised,
    group_relative,
    leave_one_out,
    mixed,
    returns_to_go,
    whitened,
)

ONE = np.zeros(4, int)
NONE = np.nan


def test_leave_one_out_has_the_closed_form():
    for rewards, expected in (([1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]), ([2, 1, 0, -1], [2, 2 / 3, -2 / 3, -2])):
        given = np.array(rewards, float)
        found = leave_one_out(given, ONE)
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        np.testing.assert_allclose(found, 4 / 3 * (given - given.mean()), rtol=1e-12)
        assert abs(found.sum()) < 1e-12


def test_group_relative_has_the_published_numbers():
    found = group_relative(np.array([1.0, 0, 0, 0]), ONE)
    np.testing.assert_allclose(found, [1.49970, -0.49990, -0.49990, -0.49990], atol=5e-6)
    found = group_relative(np.array([2.0, 1, 0, -1]), ONE)
    np.testing.assert_allclose(found, [1.161805, 0.387268, -0.387268, -1.161805], atol=5e-7)
    np.testing.assert_allclose(group_relative(np.array([2.0, 1, 0, -1]), ONE, "none"), [1.5, 0.5, -0.5, -1.5])


def test_the_batch_deviation_is_that_of_all_rewards():
    rewards, groups = np.array([1.0, 0, 5, 3]), np.array([7, 7, 2, 2])
    expected = np.array([0.5, -0.5, 1, -1]) / (np.std(rewards, ddof=1) + 1e-4)
    np.testing.assert_allclose(group_relative(rewards, groups, "batch"), expected, rtol=1e-12)


ESTIMATES = {
    "leave one out": leave_one_out,
    "group": group_relative,
    "batch": lambda rewards, groups: group_relative(rewards, groups, "batch"),
    "none": lambda rewards, groups: group_relative(rewards, groups, "none"),
}


@pytest.mark.parametrize("name", ESTIMATES)
def test_groups_are_told_by_their_ids(name):
    """Ragged groups in any order have what each has alone, except for the deviation of all rewards."""
    estimate = ESTIMATES[name]
    random = np.random.default_rng(0)
    groups = np.array([5, 3, 5, 9, 3, 5, 3, 3, 11, 5])
    rewards = random.normal(size=len(groups))
    found = estimate(rewards, groups)
    order = random.permutation(len(groups))
    np.testing.assert_allclose(estimate(rewards[order], groups[order]), found[order], rtol=1e-12)
    assert found[3] == found[8] == 0  # groups of one
    if name != "batch":
        for group in (3, 5):
            here = groups == group
            np.testing.assert_allclose(estimate(rewards[here], groups[here]), found[here], rtol=1e-12)


@pytest.mark.parametrize("name", ESTIMATES)
def test_equal_rewards_have_exactly_no_advantage(name):
    groups = np.array([0, 0, 0, 1, 1])
    found = ESTIMATES[name](np.array([0.1, 0.1, 0.1, 1.0, 0.0]), groups)
    assert (found[:3] == 0).all() and found[3] > 0 > found[4]
    assert mixed(np.array([0.1, 0.1, 0.1, 1.0, 0.0]), groups).tolist() == [False, False, False, True, True]


@pytest.mark.parametrize("name", ESTIMATES)
def test_an_rollout_without_a_reward_is_as_if_it_were_absent(name):
    rewards, groups = np.array([1.0, NONE, 0.0, 0.5, NONE, NONE]), np.array([0, 0, 0, 0, 1, 1])
    found = ESTIMATES[name](rewards, groups)
    alone = ESTIMATES[name](rewards[[0, 2, 3]], groups[[0, 2, 3]])
    np.testing.assert_allclose(found[[0, 2, 3]], alone, rtol=1e-12)
    assert (found[[1, 4, 5]] == 0).all()


def expected_gradient(estimate, p, k, only_mixed=False):
    """The exact expectation over `k` draws of a Bernoulli action of the policy gradient in its logit; reward = action.

    With `only_mixed`, over draws in which not all are equal.
    """
    total, mass = 0.0, 0.0
    for actions in itertools.product([0, 1], repeat=k):
        probability = np.prod([p if action else 1 - p for action in actions])
        if only_mixed and len(set(actions)) == 1:
            continue
        rewards = np.array(actions, float)
        total += probability * (estimate(rewards, np.zeros(k, int)) * (rewards - p)).mean()
        mass += probability
    return total / mass


def test_leave_one_out_is_unbiased_and_the_mean_baseline_shrinks_it():
    p, k = 0.574, 3
    exact = p * (1 - p)
    assert expected_gradient(leave_one_out, p, k) == pytest.approx(exact, rel=1e-12)
    mean_baseline = ESTIMATES["none"]
    assert expected_gradient(mean_baseline, p, k) == pytest.approx((k - 1) / k * exact, rel=1e-12)


def test_dropping_uniform_groups_multiplies_by_one_over_their_complement():
    p, k = 0.574, 3
    is_mixed = 1 - p**k - (1 - p) ** k
    found = expected_gradient(leave_one_out, p, k, only_mixed=True)
    assert found == pytest.approx(p * (1 - p) / is_mixed, rel=1e-12)
    assert found == pytest.approx(0.3333, abs=1e-4)


REWARDS, VALUES = np.array([[0.0, 0, 1]]), np.array([[0.5, 0.4, 0.3]])


def test_generalised_advantages_have_the_published_numbers():
    everything = np.ones((1, 3), bool)
    advantages, returns = generalised(REWARDS, VALUES, everything, 1.0, 0.95)
    np.testing.assert_allclose(advantages, [[0.43675, 0.565, 0.7]], rtol=1e-12)
    np.testing.assert_allclose(returns, [[0.93675, 0.965, 1.0]], rtol=1e-12)
    np.testing.assert_allclose(whitened(advantages, everything), [[-0.991344, -0.017092, 1.008436]], atol=1e-6)
    at_one, at_zero = (generalised(REWARDS, VALUES, everything, 1.0, lam)[0] for lam in (1.0, 0.0))
    np.testing.assert_allclose(at_one, 1.0 - VALUES, rtol=1e-12)
    np.testing.assert_allclose(at_zero, [[-0.1, -0.1, 0.7]], rtol=1e-12)


@pytest.mark.parametrize("place", range(4))
def test_a_unit_that_does_not_count_changes_no_other(place):
    everything = np.ones((1, 3), bool)
    given = [np.insert(x, place, junk, axis=1) for x, junk in ((REWARDS, 9.0), (VALUES, -7.0), (everything, False))]
    for found, expected in zip(
        generalised(*given, 0.9, 0.95), generalised(REWARDS, VALUES, everything, 0.9, 0.95), strict=True
    ):
        assert found[0, place] == 0
        np.testing.assert_allclose(np.delete(found, place, axis=1), expected, rtol=1e-12)


def test_rollouts_do_not_see_each_other():
    """A rollout's end is not followed by the next rollout's first value: a batch of two equals two batches."""
    random = np.random.default_rng(1)
    rewards, values = random.normal(size=(2, 2, 5))
    mask = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], bool)
    both = generalised(rewards, values, mask, 0.9, 0.8)
    for row in (0, 1):
        alone = generalised(rewards[row : row + 1], values[row : row + 1], mask[row : row + 1], 0.9, 0.8)
        for found, expected in zip(both, alone, strict=True):
            np.testing.assert_array_equal(found[row : row + 1], expected)


def test_returns_to_go_discount_what_follows():
    mask = np.array([[True, False, True, True]])
    found = returns_to_go(np.array([[1.0, 5, 2, 4]]), mask, 0.5)
    np.testing.assert_allclose(found, [[3.0, 0, 4, 4]])


def test_whitening_counts_the_masked_units_only():
    advantages, mask = np.array([[1.0, 2, 50], [4, -3, 60]]), np.array([[1, 1, 0], [1, 1, 0]], bool)
    found = whitened(advantages, mask)
    inside = np.array([1.0, 2, 4, -3])
    np.testing.assert_allclose(found[mask], (inside - inside.mean()) / np.sqrt(inside.var(ddof=1) + 1e-8), rtol=1e-12)
    assert (found[~mask] == 0).all()
    assert (whitened(advantages, np.zeros_like(mask)) == 0).all()


def test_explained_variance_has_the_closed_form():
    """Of independent signal and rest with variances 4 and 1, a critic that knows the signal explains 4 / 5."""
    signal, rest = np.array([[2.0, 2.0, -2.0, -2.0, 9.0]]), np.array([[1.0, -1.0, 1.0, -1.0, 9.0]])
    mask = np.array([[True, True, True, True, False]])
    assert explained_variance(signal + 5, signal + rest, mask) == pytest.approx(0.8)
    assert explained_variance(0 * signal, signal + rest, mask) == 0
    assert explained_variance(-signal, signal + rest, mask) < 0
    assert np.isnan(explained_variance(signal, 0 * signal, mask)) and np.isnan(
        explained_variance(signal, signal, mask & False)
    )


def test_the_weight_of_the_divergence_has_the_published_rule():
    """Ziegler et al. 2019: times 1 + 0.1 clip((KL - target) / target, -0.2, 0.2), with a batch of a tenth of a horizon.

    lm-human-preferences and TRL have the batch over the horizon in place of 0.1: equal numbers.
    """
    rule = {"target": 6.0, "horizon": 10_000, "num_rollouts": 1000}
    for divergence, expected in ((6.0, 0.2), (6.6, 0.202), (60.0, 0.204), (5.4, 0.198), (0.0, 0.196), (-9.0, 0.196)):
        assert adapted_weight(0.2, divergence, **rule) == pytest.approx(expected, rel=1e-12)
    # Ten thousand rollouts at the limit, in steps of ten: a continuous growth of a fifth.
    weight = 1.0
    for _ in range(1000):
        weight = adapted_weight(weight, 99.0, target=6.0, horizon=10_000, num_rollouts=10)
    assert weight == pytest.approx(np.exp(0.2), rel=1e-4)


def summed(rewards, values, mask, gamma, lam, last):
    """GAE's definition, one sum per unit: the exponentially weighted surprises of the units from it on (eq. 16)."""
    found = np.zeros_like(rewards)
    for row in range(len(rewards)):
        units = np.flatnonzero(mask[row])
        following = [*values[row, units[1:]], last[row]]
        surprise = [
            rewards[row, unit] + gamma * v - values[row, unit] for unit, v in zip(units, following, strict=True)
        ]
        for place, unit in enumerate(units):
            found[row, unit] = sum((gamma * lam) ** k * surprise[place + k] for k in range(len(units) - place))
    return found


def test_what_is_cut_goes_on_with_the_value_of_what_was_seen_last():
    """Schulman et al. 2016, with the value after the end that Gymnasium asks for where an episode is truncated."""
    random = np.random.default_rng(3)
    rewards, values = random.normal(size=(2, 5, 6))
    mask = np.arange(6) < np.array([6, 1, 4, 2, 5])[:, None]
    mask[4, 2] = False
    last = np.array([0.0, 0.7, -0.4, 0.0, 1.3])
    advantages, returns = generalised(rewards, values, mask, 0.9, 0.8, last)
    expected = summed(rewards, values, mask, 0.9, 0.8, last)
    np.testing.assert_allclose(advantages, expected, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(returns, np.where(mask, expected + values, 0.0), rtol=1e-12, atol=1e-14)
    # With lam 1 a return is the discounted sum of all rewards, and of what is expected then.
    _, whole = generalised(rewards, values, mask, 0.9, 1.0, last)
    assert whole[2, 0] == pytest.approx(rewards[2, :4] @ 0.9 ** np.arange(4) + 0.9**4 * -0.4)
    # Each rollout has its own end.
    alone = generalised(rewards[2:3], values[2:3], mask[2:3], 0.9, 0.8, last[2:3])[0]
    np.testing.assert_array_equal(alone, advantages[2:3])
