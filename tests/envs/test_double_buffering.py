"""Two batches of episodes in turn: what is done at the same time, by which thread, and in which order."""

import threading
import time

import numpy as np
import pytest
from envs.test_rollout import Counter, keys_of

from openpi_train.envs.double_buffering import SlotTimes, in_slots
from openpi_train.envs.rollout import RolloutEpisodes
from openpi_train.runtime.preempt import StoppedError

GOALS = ([5, 12], [3, 4], [12, 12], [1, 9])


class Noted(Counter):
    """Notes what is asked of it, by whom; a batch takes its own time."""

    def step(self, states, actions):
        NOTES.append(("step", int(states[1][0]), threading.get_ident()))
        time.sleep(PAUSES.get(int(states[1][0]), 0.0))
        return super().step(states, actions)


NOTES: list[tuple] = []
PAUSES: dict[int, float] = {}


@pytest.fixture(autouse=True)
def empty():
    NOTES.clear()
    PAUSES.clear()


def batches(policy=None):
    for goals in GOALS:

        def act(observation, keys, goals=goals):
            NOTES.append(("query", goals[0], threading.get_ident()))
            return np.ones((2, 2, 1))

        yield RolloutEpisodes(policy or act, Noted(), keys_of(2), np.array(goals), execute=2)


def results(num_slots, **how):
    found = {number: episodes.outcome for number, episodes in in_slots(batches(), num_slots, **how)}
    return {number: (one.success.tolist(), one.steps.tolist()) for number, one in sorted(found.items())}


def test_outcomes_are_those_of_one_slot_and_the_known_answer():
    assert results(1) == results(2) == results(3)
    assert results(2) == {
        number: ([goal <= 10 for goal in goals], [min(goal, 10) for goal in goals])
        for number, goals in enumerate(GOALS)
    }


def test_the_environment_has_a_thread_and_the_policy_stays_in_this_one():
    results(2)
    threads = {what: {one[2] for one in NOTES if one[0] == what} for what in ("query", "step")}
    assert threads["query"] == {threading.get_ident()}
    assert len(threads["step"]) == 1 and threads["step"] != threads["query"]
    NOTES.clear()
    results(1)
    assert {one[2] for one in NOTES} == {threading.get_ident()}


def test_what_this_thread_does_depends_on_no_ones_speed():
    """So that several processes ask each other the same questions."""

    def order(pauses):
        NOTES.clear()
        PAUSES.update(pauses)
        asked = []
        results(2, all_done=lambda done: asked.append(done) or done, stop_requested=lambda: asked.append("stop"))
        return asked, [one[1] for one in NOTES if one[0] == "query"]

    assert order({}) == order({5: 0.003}) == order({3: 0.003, 5: 0.0})


def test_the_policy_acts_for_one_batch_while_the_other_steps():
    """The first step of the second batch goes on until the first batch asks for its second chunk."""
    asked, was_asked = threading.Event(), []
    numbers = iter(range(100))

    def policy(observation, keys):
        if next(numbers) == 2:
            asked.set()
        return np.ones((2, 2, 1))

    class Waiting(Counter):
        def step(self, states, actions):
            if states[1][0] == 7 and states[0][0] == 0:
                was_asked.append(asked.wait(10))
            return super().step(states, actions)

    def two():
        for goals in ([8, 8], [7, 7]):
            yield RolloutEpisodes(policy, Waiting(), keys_of(2), np.array(goals), execute=2)

    times = SlotTimes()
    assert len(list(in_slots(two(), 2, times=times))) == 2 and was_asked == [True]
    assert times.both_s > 0 and times.policy_s > times.both_s


@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_stop_and_what_the_environment_raises_end_it(num_slots):
    answers = iter([False] * 5 + [True])
    with pytest.raises(StoppedError):
        results(num_slots, stop_requested=answers.__next__)
    assert sum(one[0] == "query" for one in NOTES) == 5 and threading.active_count() == len(threading.enumerate())

    class Broken(Counter):
        def step(self, states, actions):
            raise RuntimeError("the arm is broken")

    broken = RolloutEpisodes(lambda *_: np.ones((2, 2, 1)), Broken(), keys_of(2), np.array([5, 5]), execute=2)
    with pytest.raises(RuntimeError, match="the arm is broken"):
        list(in_slots([broken], num_slots))
    assert not any(thread.name.startswith("environment") for thread in threading.enumerate())


def test_the_time_of_both_is_that_in_which_spans_meet():
    times = SlotTimes(policy=[(0, 2), (3, 5), (8, 9)], environment=[(1, 4), (4.5, 4.75), (4.8, 8.5)])
    assert times.both_s == pytest.approx(1 + 1 + 0.25 + 0.2 + 0.5)
    assert times.policy_s == 5 and times.environment_s == pytest.approx(3 + 0.25 + 3.7)
    assert SlotTimes(policy=[(0, 1)]).both_s == SlotTimes(policy=[(0, 1)], environment=[(1, 2)]).both_s == 0
