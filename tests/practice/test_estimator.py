"""Which advantages attempts get, by kind, with the divergence from a reference in the reward."""

import numpy as np
import pytest

from openpi_train.practice.advantages import generalised, group_relative, leave_one_out, whitened
from openpi_train.practice.estimator import AdvantageEstimator

REWARDS, GROUPS = np.array([1.0, 0.0, 0.5, np.nan]), np.array([4, 4, 4, 4])
MASK = np.array([[0, 1, 1, 0], [0, 1, 1, 1], [0, 1, 0, 0], [0, 1, 1, 0]], bool)
RANDOM = np.random.default_rng(0)
LOG_RATIOS, VALUES = RANDOM.normal(size=(2, 4, 4))


@pytest.mark.parametrize(("kind", "function"), [("grpo", group_relative), ("rloo", leave_one_out)])
def test_a_groups_attempts_have_one_advantage_for_all_their_units(kind, function):
    advantages, _ = AdvantageEstimator(kind=kind)(REWARDS, GROUPS, MASK, None, None)
    np.testing.assert_array_equal(advantages, function(REWARDS, GROUPS)[:, None] * MASK)
    advantages, _ = AdvantageEstimator(kind=kind, kl_weight=0.1)(REWARDS, GROUPS, MASK, LOG_RATIOS, None)
    whole = REWARDS - 0.1 * (LOG_RATIOS * MASK).sum(axis=1)
    np.testing.assert_array_equal(advantages, function(whole, GROUPS)[:, None] * MASK)


def test_a_reward_is_earned_once_at_the_last_unit():
    """L5: the divergence where it arises, the score once."""
    estimator = AdvantageEstimator(kind="gae", kl_weight=0.2, whiten=False, gamma=0.9, lam=0.7)
    advantages, returns = estimator(REWARDS, GROUPS, MASK, LOG_RATIOS, VALUES)
    earned = -0.2 * LOG_RATIOS
    earned[[0, 1, 2], [2, 3, 1]] += REWARDS[:3]
    expected = generalised(earned, VALUES, MASK, 0.9, 0.7)
    np.testing.assert_allclose(advantages[:3], expected[0][:3], rtol=1e-12)
    np.testing.assert_allclose(returns[:3], expected[1][:3], rtol=1e-12)
    assert (advantages[3] == 0).all()
    np.testing.assert_array_equal(returns[3], VALUES[3] * MASK[3])


def test_reinforce_plus_plus_whitens_what_is_still_earned():
    advantages, _ = AdvantageEstimator(kind="reinforce_plus_plus")(REWARDS, GROUPS, MASK, None, None)
    known = MASK & (np.arange(4) < 3)[:, None]
    np.testing.assert_allclose(advantages, whitened(np.where(known, REWARDS[:, None], 0.0), known), rtol=1e-12)


def test_values_out_of_range_are_named():
    assert AdvantageEstimator(gamma=1.5, lam=-0.1).check() == [
        "gamma 1.5 must be from 0 to 1",
        "lam -0.1 must be from 0 to 1",
    ]
