"""Temporal ensembling against its definition."""

import jax
import numpy as np

from openpi_train.envs.base import EnvObservation
from openpi_train.envs.ensembling import Ensembled, ensemble

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
