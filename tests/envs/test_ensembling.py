"""Temporal ensembling against its definition."""

import following
import jax
import numpy as np
import pytest

from openpi_train.envs.ensembling import Ensembled, ensemble
from openpi_train.envs.env import EnvObservation

PLANS = [np.random.default_rng(seed).normal(size=(2, 4, 3)) for seed in range(3)]


def test_each_action_is_the_weighted_mean_of_the_plans_that_reach_it():
    rate, ages = 0.7, (2, 1, 0)
    found = ensemble(PLANS, ages, rate)
    for step in range(4):
        said = [plan[:, step + age] for plan, age in zip(PLANS, ages, strict=True) if step + age < 4]
        weights = np.exp(-rate * np.arange(len(said)))
        np.testing.assert_allclose(found[:, step], np.tensordot(weights / weights.sum(), said, 1), rtol=1e-12)


def test_alone_or_with_a_large_rate_the_oldest_plan_decides():
    np.testing.assert_array_equal(ensemble(PLANS[:1], [0], 0.1), PLANS[0])
    np.testing.assert_allclose(ensemble(PLANS, (2, 1, 0), 1e3)[:, :2], PLANS[0][:, 2:])


def test_a_policy_is_asked_at_every_turn_and_old_chunks_are_forgotten():
    said = iter(np.full((1, 4, 1), float(number)) for number in range(9))
    policy = Ensembled(lambda observation, keys: next(said), rate=0.0, execute=2)
    seen = EnvObservation(images={}, state=np.zeros((1, 1), np.float32), task=np.zeros(1, int))
    plans = [policy(seen, jax.random.split(jax.random.key(0), 1))[0, :, 0].tolist() for _ in range(4)]
    assert plans == [[0, 0, 0, 0], [0.5, 0.5, 1, 1], [1.5, 1.5, 2, 2], [2.5, 2.5, 3, 3]]


@pytest.mark.parametrize(("horizon", "execute"), [(4, 1), (4, 3), (5, 2), (3, 3)])
@pytest.mark.parametrize("rate", [0.0, 0.7, -0.3])
def test_each_action_that_is_carried_out_is_the_mean_of_all_that_was_planned_for_its_time(horizon, execute, rate):
    steps, said = 9, np.random.default_rng(0).normal(size=(9, 2, horizon, 2))
    plans = iter(said)
    found = following.executed(Ensembled(lambda *_: next(plans), rate, execute), execute=execute, steps=steps)
    for time in range(steps):
        asked = range(0, time + 1, execute)
        known = [said[begun // execute, :, time - begun] for begun in asked if time - begun < horizon]
        shares = [np.exp(-rate * older) for older in range(len(known))]
        wanted = sum(share * one for share, one in zip(shares, known, strict=True)) / sum(shares)
        np.testing.assert_allclose(found[:, time], wanted, rtol=1e-12)
