"""Which groups an iteration learns from: waves, filler, prompts that are passed over."""

import logging

import numpy as np
import pytest
from rl.scripted import ScriptedActor, ScriptedRL

from openpi_train.rl.collection import Collector
from openpi_train.rl.estimator import AdvantageEstimator
from openpi_train.rl.outcomes import Outcomes
from openpi_train.runtime.preempt import StoppedError


def mixed_in(prompt_ids):
    """Rollouts 0 of these prompts succeed, and all rollouts at prompt 0."""
    return lambda prompt_id, number: float(prompt_id == 0 or (prompt_id in prompt_ids and number == 0))


def collector(reward, **settings):
    rl = ScriptedRL(**{"num_groups": 2, "group_size": 3, **settings})
    return Collector(rl, ScriptedActor(reward))


def test_without_dynamic_sampling_all_groups_are_kept():
    found = collector(mixed_in({1})).collect({})
    assert found.groups.tolist() == [0, 0, 0, 1, 1, 1] and found.counts.all()
    assert found.metrics["groups_mixed"] == 0.5 and found.metrics["waves"] == 1
    assert found.metrics["reward"] == found.metrics["success"] == pytest.approx(4 / 6)
    assert found.metrics["rollouts"] == 6


def test_mixed_groups_are_kept_in_the_order_of_their_draws():
    one = collector(mixed_in({3, 4, 5, 7}), mixed_only=True)
    found = one.collect({})
    assert found.groups.tolist() == [3, 3, 3, 4, 4, 4] and found.counts.all() and found.metrics["waves"] == 3
    assert found.rollouts.columns["tokens"][:, 0].tolist() == found.groups.tolist()
    # Group 5 was one too many, and is not kept for later.
    assert one.draws == 6
    assert one.collect({}).groups.tolist()[:3] == [7, 7, 7]


def test_with_lanes_a_group_takes_the_place_of_one_in_its_own_lane_only():
    """Two groups of three in a batch of six: even draws take the first three rows."""
    one = collector(mixed_in({2, 3, 5, 7, 9, 6}), mixed_only=True, num_groups=4)
    one._actor.num_lanes = 6
    found = one.collect({})
    assert found.groups.tolist() == [2, 2, 2, 3, 3, 3, 6, 6, 6, 5, 5, 5] and found.counts.all()
    one = collector(mixed_in({1, 3, 5}), mixed_only=True, max_waves=2)
    one._actor.num_lanes = 6
    found = one.collect({})
    assert found.groups.tolist() == [0, 0, 0, 1, 1, 1] and found.counts.tolist() == [False] * 3 + [True] * 3


def test_missing_groups_are_filled_with_rollouts_that_do_not_count():
    one = collector(mixed_in({2}), mixed_only=True, max_waves=3)
    found = one.collect({})
    assert found.groups[:3].tolist() == [2, 2, 2] and found.counts.tolist() == [True] * 3 + [False] * 3
    assert len(found.rollouts) == 6 and found.metrics["filled"] == 0.5 and one.draws == 6


def test_uniform_groups_alone_end_within_the_most_waves_and_are_told(caplog):
    one = collector(lambda *_: 0.0, mixed_only=True, max_waves=2)
    with caplog.at_level(logging.WARNING):
        found = one.collect({})
    assert not found.counts.any() and one.draws == 4
    assert "nothing is learnt from this iteration" in caplog.text


@pytest.mark.parametrize(("kind", "is_told"), [("grpo", True), ("rloo", True), ("reinforce_plus_plus", False)])
def test_uniform_groups_that_are_kept_are_told_where_they_have_no_advantages(caplog, kind, is_told):
    for reward, is_uniform in ((lambda *_: 0.0, True), (mixed_in({1}), False)):
        caplog.clear()
        one = collector(reward, advantages=AdvantageEstimator(kind=kind))
        with caplog.at_level(logging.WARNING):
            assert one.collect({}).counts.all()
        assert ("none is better than another of its group" in caplog.text) == (is_told and is_uniform)


def test_a_context_that_is_solved_is_passed_over_and_then_drawn_again():
    actor = ScriptedActor(lambda prompt_id, _: float(prompt_id == 1), num_prompts=4)
    one = Collector(ScriptedRL(num_groups=4, group_size=2, skip_solved=2), actor)
    for _ in range(4):
        one.collect({})
    assert actor.acted == [0, 1, 2, 3, 4, 6, 7, 8, 10, 11, 12, 13, 14, 15, 16, 18]
    assert one.outcomes.rate(1) == 1.0 and one.outcomes.rate(0) == 0.0 and one.outcomes.rate(77) is None


def test_where_all_contexts_are_solved_they_are_drawn_again_and_that_is_told(caplog):
    actor = ScriptedActor(lambda *_: 1.0, num_prompts=4)
    one = Collector(ScriptedRL(num_groups=4, group_size=2, skip_solved=10**9), actor)
    with caplog.at_level(logging.WARNING):
        one.collect({})
        assert "all prompts are solved" not in caplog.text
        one.collect({})
        one.collect({})
    # Each time a whole pass is passed over.
    assert actor.acted == [0, 1, 2, 3, 8, 13, 18, 23, 28, 33, 38, 43]
    assert caplog.text.count("all prompts are solved: they are drawn again") == 1


def test_a_collection_that_was_stopped_is_made_again_alike():
    """Whether in its first wave or a later one; the second wave has waited for what came of the first."""
    straight = collector(mixed_in({3, 4, 9}), mixed_only=True, skip_solved=1)
    expected = [straight.collect({}) for _ in range(2)]
    for wave in (1, 2):
        one = collector(mixed_in({3, 4, 9}), mixed_only=True, skip_solved=1)
        one.collect({})
        act, before, left = one._actor.act, (one.draws, one.outcomes.as_json()), [wave]

        def acting(*arguments, act=act, left=left):
            left[0] -= 1
            if left[0] == 0:
                raise StoppedError
            return act(*arguments)

        one._actor.act = acting
        with pytest.raises(StoppedError):
            one.collect({})
        assert (one.draws, one.outcomes.as_json()) == before
        again = one.collect({})
        assert (
            again.groups.tolist() == expected[1].groups.tolist()
            and again.counts.tolist() == expected[1].counts.tolist()
        )
    assert (one.draws, one.outcomes.as_json()) == (straight.draws, straight.outcomes.as_json())


def test_outcomes_do_not_depend_on_the_order_of_rollouts_and_survive_json():
    random = np.random.default_rng(0)
    prompt_ids, outcomes = random.integers(0, 5, 40), random.integers(0, 2, 40).astype(float)
    outcomes[3] = np.nan
    order = random.permutation(40)
    one, other = Outcomes(), Outcomes()
    one.record(prompt_ids, outcomes)
    other.record(prompt_ids[order], outcomes[order])
    assert one.as_json() == other.as_json() == Outcomes(one.as_json()).as_json()
    known = ~np.isnan(outcomes) & (prompt_ids == 2)
    assert one.rate(2) == outcomes[known].mean()
