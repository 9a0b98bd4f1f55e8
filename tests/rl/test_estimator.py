"""Which advantages rollouts get, by kind, with the divergence from a reference in the reward."""

import numpy as np
import pytest

from openpi_train.rl.advantages import generalised, group_relative, leave_one_out, whitened
from openpi_train.rl.estimator import AdvantageEstimator, Decisions

REWARDS, GROUPS = np.array([1.0, 0.0, 0.5, np.nan]), np.array([4, 4, 4, 4])
MASK = np.array([[0, 1, 1, 0], [0, 1, 1, 1], [0, 1, 0, 0], [0, 1, 1, 0]], bool)
RANDOM = np.random.default_rng(0)
LOG_RATIOS, VALUES = RANDOM.normal(size=(2, 4, 4))


@pytest.mark.parametrize(("kind", "function"), [("grpo", group_relative), ("rloo", leave_one_out)])
def test_a_groups_rollouts_have_one_advantage_for_all_their_units(kind, function):
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


def test_whitened_rewards_keep_their_mean():
    """TRL's masked_whiten with shift_mean=False: on what units earn, the divergence included, before anything else."""
    kinds = {"gae": {"gamma": 0.9, "lam": 0.7}, "reinforce_plus_plus": {}}
    earned = np.array([[0, 0, 1.0, 0], [0, 0, 0, 0], [0, 0.5, 0, 0]]) - 0.2 * LOG_RATIOS[:3] * MASK[:3]
    known = earned[MASK[:3]]
    assert len(known) == 6
    scaled = known.mean() + (known - known.mean()) / np.sqrt(np.var(known, ddof=1) + 1e-8)
    expected = np.zeros((4, 4))
    expected[:3][MASK[:3]] = scaled
    for kind, settings in kinds.items():
        estimator = AdvantageEstimator(kind=kind, kl_weight=0.2, whiten=False, whiten_rewards=True, **settings)
        advantages, returns = estimator(REWARDS, GROUPS, MASK, LOG_RATIOS, VALUES)
        values, gamma, lam = (VALUES, 0.9, 0.7) if kind == "gae" else (0 * VALUES, 1.0, 1.0)
        found = generalised(expected, values, MASK, gamma, lam)
        np.testing.assert_allclose(advantages[:3], found[0][:3], rtol=1e-12)
        assert (advantages[3] == 0).all()
        if kind == "gae":
            np.testing.assert_allclose(returns[:3], found[1][:3], rtol=1e-12)


def test_a_weight_of_the_moment_takes_the_place_of_the_configs():
    given = (REWARDS, GROUPS, MASK, LOG_RATIOS, VALUES)
    for kind in ("rloo", "gae"):
        now, _ = AdvantageEstimator(kind=kind, kl_weight=0.1)(*given, 0.3)
        np.testing.assert_array_equal(now, AdvantageEstimator(kind=kind, kl_weight=0.3)(*given)[0])


def test_values_out_of_range_are_named():
    assert AdvantageEstimator(gamma=1.5, lam=-0.1).check(8) == [
        "gamma 1.5 must be from 0 to 1",
        "lam -0.1 must be from 0 to 1",
    ]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"kl_horizon": 100}, "kl_horizon 100 has no effect on a constant weight: give kl_target"),
        ({"kl_target": 0.0, "kl_weight": 0.1}, "kl_target 0.0 must be above 0 and finite"),
        ({"kl_target": 6.0}, "kl_target 6.0 adapts kl_weight, which is 0 and would stay 0"),
        (
            {"kl_target": 6.0, "kl_weight": 0.1, "kl_horizon": 20},
            "kl_horizon 20 is too short for the 100 rollouts of an iteration",
        ),
        ({"kind": "grpo", "whiten_rewards": True}, "whiten_rewards is for kinds whose units earn something each"),
    ],
)
def test_settings_that_contradict_each_other_are_named(settings, problem):
    (found,) = AdvantageEstimator(**settings).check(100)
    assert problem in found
    # The weight stays above 0 from the next horizon on.
    assert not AdvantageEstimator(kl_target=6.0, kl_weight=0.1, kl_horizon=21).check(100)


def in_units(of_queries, units=3):
    return np.repeat(of_queries, units, axis=1)


def test_a_robots_gae_goes_from_query_to_query():
    """Three queries of three units each: what they earned, and the value where the second rollout was cut."""
    random = np.random.default_rng(1)
    values, earned = random.normal(size=(2, 4, 3))
    counts = np.array([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1]], bool)
    decisions = Decisions(rewards=np.where(counts, earned, 9.0), last_values=np.array([0.0, 0.8, 0.0, 0.0]))
    estimator = AdvantageEstimator(kind="gae", whiten=False, gamma=0.9, lam=0.7)
    given = (np.array([1.0, 0.0, 0.5, np.nan]), np.arange(4), in_units(counts), None, in_units(values))
    advantages, returns = estimator(*given, decisions=decisions)
    expected = np.zeros((4, 3))
    for row, length in ((0, 2), (1, 3), (2, 1)):
        following = [*values[row, 1:length], decisions.last_values[row]]
        surprise = earned[row, :length] + 0.9 * np.array(following) - values[row, :length]
        for place in range(length):
            expected[row, place] = surprise[place:] @ 0.63 ** np.arange(length - place)
    np.testing.assert_allclose(advantages, in_units(expected), rtol=1e-12, atol=1e-14)
    known = counts & (np.arange(4) < 3)[:, None]
    np.testing.assert_allclose(returns[:3], in_units(np.where(known, expected + values, 0.0))[:3], rtol=1e-12)
    # A rollout without a reward keeps its values.
    np.testing.assert_array_equal(returns[3], in_units(values)[3])
    # Whitened over queries, which all count the same.
    white, _ = AdvantageEstimator(kind="gae", gamma=0.9, lam=0.7)(*given, decisions=decisions)
    of_known = expected[known]
    scaled = (of_known - of_known.mean()) / np.sqrt(of_known.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(white[:, ::3][known], scaled, rtol=1e-9)
    assert (white[~in_units(known)] == 0).all()


def test_a_robots_divergence_is_paid_at_its_query():
    """With lam 1, gamma 1 and values of 0 an advantage is all that is still earned."""
    ratios = np.arange(6.0).reshape(1, 6)
    decisions = Decisions(rewards=np.array([[1.0, 2.0, 0.0]]), last_values=np.zeros(1))
    estimator = AdvantageEstimator(kind="gae", whiten=False, lam=1.0, kl_weight=0.1)
    mask = np.array([[1, 1, 1, 1, 0, 0]], bool)
    advantages, _ = estimator(np.array([3.0]), np.zeros(1, int), mask, ratios, np.zeros((1, 6)), decisions=decisions)
    np.testing.assert_allclose(advantages, [[2.4, 2.4, 1.5, 1.5, 0, 0]], rtol=1e-12)
