"""Scores: Wilson's interval by its definition, tables and JSON by hand."""

import math
import statistics

import pytest

from openpi_train.envs.score import EpisodeResult, Score, wilson


@pytest.mark.parametrize(("successes", "trials", "confidence"), [(3, 10, 0.95), (57, 60, 0.95), (1, 2, 0.8)])
def test_at_both_ends_the_observed_share_is_as_far_off_as_the_confidence_says(successes, trials, confidence):
    z, share = statistics.NormalDist().inv_cdf((1 + confidence) / 2), successes / trials
    low, high = wilson(successes, trials, confidence)
    assert low < share < high
    for end in (low, high):  # the score test's equation, whose two solutions Wilson's interval is
        assert abs(share - end) == pytest.approx(z * math.sqrt(end * (1 - end) / trials), rel=1e-9)


def test_none_and_all_and_no_trial_at_all():
    z2 = statistics.NormalDist().inv_cdf(0.975) ** 2
    assert wilson(0, 10) == (0.0, pytest.approx(z2 / (10 + z2)))
    assert wilson(10, 10) == (pytest.approx(10 / (10 + z2)), 1.0)
    assert wilson(0, 0) == (0.0, 1.0)


def test_impossible_counts_are_refused():
    with pytest.raises(ValueError, match="3 successes of 2 trials"):
        wilson(3, 2)


def test_a_score_counts_per_task_and_over_all():
    episodes = [("reach", True, 10), ("pick", False, 80), ("reach", True, 20), ("pick", True, 30)]
    score = Score(
        episodes=tuple(
            EpisodeResult(number=n, task=task, success=success, steps=steps)
            for n, (task, success, steps) in enumerate(episodes)
        )
    )
    assert list(score.by_task) == ["reach", "pick"]
    assert (score.by_task["reach"].successes, score.by_task["reach"].mean_steps) == (2, 15.0)
    assert score.metrics()["success/pick"] == 0.5
    assert score.metrics()["success/all"] == 0.75
    assert score.as_json()["overall"]["low"] == wilson(3, 4)[0]
    low, high = wilson(1, 2)
    line = score.table().splitlines()[2]
    assert line.split() == ["pick", "1/2", "50.0%", f"{low:.1%}", "-", f"{high:.1%}", "30"]
