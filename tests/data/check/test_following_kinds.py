"""Grippers and arms that do not follow their actions as in other episodes: inverted, of another scale, late."""

import numpy as np
import pytest
from made_episodes import ACTION, STATE, WRITERS, Hand, InMemory, Made, sound
from test_fault_kinds import found

from openpi_train.data.check import following_measures
from openpi_train.data.core.source import About
from openpi_train.data.formats.detection import source_at

NAMES = ("x", "y", "z", "gripper")


def named(episodes):
    """Without a robot, grippers are known by the dataset's own names."""
    source = InMemory(episodes)
    source.about = lambda: About(dim_names={STATE: NAMES, ACTION: NAMES})
    return source


def positions(number=16, length=60, delay=3):
    """Episodes whose actions are positions that the arm reaches `delay` steps later, within its control's error."""
    episodes, random = sound(number, length), np.random.default_rng(7)
    for one in episodes:
        moves = random.normal(0, 0.03, one.action[:, :3].shape)
        wanted = np.cumsum(moves, axis=0) + random.normal(0, 0.2, 3)
        one.action[:, :3] = wanted
        reached = np.concatenate([np.repeat(wanted[:1], delay, axis=0), wanted])[: len(wanted)]
        one.state[:, :3] = reached + random.normal(0, 0.003, reached.shape)
    return episodes


def inverted_state(one: Made):
    one.state[:, -1] = 1 - one.state[:, -1]


def inverted_action(one: Made):
    one.action[:, -1] = 1 - one.action[:, -1]


@pytest.mark.parametrize("fault", [inverted_state, inverted_action])
@pytest.mark.parametrize("numbers", [(3,), (2, 5, 6, 9, 11), (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)])
def test_a_gripper_that_is_inverted_in_some_episodes_is_found(fault, numbers):
    episodes = sound()
    for number in numbers:
        fault(episodes[number])
    for source, robot in ((named(episodes), None), (InMemory(episodes), Hand())):
        findings = found(source, robot)
        assert set(findings) == {"gripper inverted in some episodes"}
        few = set(numbers) if len(numbers) < 8 else set(range(16)) - set(numbers)
        assert findings["gripper inverted in some episodes"].count == len(few)
        assert f"episode {min(few)}, step 0" in findings["gripper inverted in some episodes"].where
    # Without names nobody knows which dim is a gripper.
    assert not found(InMemory(episodes))


def test_a_gripper_that_goes_against_its_action_everywhere_has_one_convention():
    episodes = sound()
    for one in episodes:
        inverted_state(one)
    assert not found(named(episodes))


def test_a_hand_that_is_late_holds_something_or_rests_is_not_inverted():
    episodes, random = sound(length=40), np.random.default_rng(3)
    for number, one in enumerate(episodes):
        steps = np.arange(len(one.state))
        one.action[:, -1] = (steps < 8) | (steps > 17)  # closed for 10 steps, and follows 7 steps later
        one.state[:, -1] = np.roll(1 - 0.5 * (1 - one.action[:, -1]), 7)
        one.state[:7, -1] = 1
        one.state[:, -1] += random.normal(0, 0.005, len(steps))
        if number % 4 == 1:
            one.action[:, -1] = 1
            one.state[:, -1] = 1 - 0.001 * steps  # it rests, and its sensor drifts
        if number % 4 == 2:
            one.state[:, -1] = 1 + 1e-4 * steps  # it does not follow at all
    assert not found(named(episodes))


@pytest.mark.parametrize("factor", [100, 255])
@pytest.mark.parametrize("both", [False, True])
def test_a_gripper_of_another_scale_in_some_episodes_is_found(factor, both):
    episodes = sound()
    for one in (episodes[4], episodes[7]):
        one.state[:, -1] *= factor
        if both:
            one.action[:, -1] *= factor
    finding = found(named(episodes))["gripper of several scales"]
    assert (finding.count, finding.total) == (2, 16) and "episode 4, step 0" in finding.where
    assert "gripper moves by" in finding.what
    assert "gripper of several scales" in found(InMemory(episodes), Hand())


def test_grippers_of_lerobots_own_names_are_compared(tmp_path):
    episodes = sound()
    inverted_state(episodes[3])
    path = WRITERS["lerobot"](tmp_path / "made", episodes)
    finding = found(source_at(str(path)).open())["gripper inverted in some episodes"]
    assert "observation/state: gripper goes against action: gripper" in finding.what
    assert "episode 3, step 0" in finding.where


@pytest.mark.parametrize("make", [lambda: sound(length=60), positions])
def test_actions_that_are_late_in_some_episodes_are_found(make):
    for lag in (2, 3, 5):
        episodes = make()
        assert not found(named(episodes))
        for one in (episodes[5], episodes[8]):
            one.action[lag:, :3] = one.action[:-lag, :3].copy()
        findings = found(named(episodes))
        assert set(findings) == {"actions late"}
        assert findings["actions late"].count == 2 and "episode 5, step 0" in findings["actions late"].where


@pytest.mark.parametrize("lag", [3, 5])
def test_actions_that_come_after_their_motion_everywhere_are_found(lag):
    episodes = sound(length=60)
    for one in episodes:
        one.action[lag:, :3] = one.action[:-lag, :3].copy()
    finding = found(named(episodes))["actions late"]
    assert finding.count == 16
    # sound() moves its state within the step of the action.
    assert f"the states move {lag + 1} control steps before" in finding.what


@pytest.mark.parametrize("delay", [0, 1, 3, 6])
def test_the_delay_of_a_controller_is_sound(delay):
    assert not found(named(positions(delay=delay)))


@pytest.mark.parametrize("make", [lambda: sound(length=60), positions])
@pytest.mark.parametrize("numbers", [(6,), range(4, 10)])
def test_a_dim_that_is_inverted_in_some_episodes_is_found(make, numbers):
    episodes = make()
    for number in numbers:
        episodes[number].action[:, 1] *= -1
    findings = found(InMemory(episodes))
    assert set(findings) == {"action inverted"}
    finding = findings["action inverted"]
    assert finding.count == len(numbers) and f"episode {min(numbers)}, step 0" in finding.where
    assert "observation/state[1] moves against action[1], and with it in the others" in finding.what


@pytest.mark.parametrize("make", [lambda: sound(length=60), positions])
def test_a_dim_that_is_inverted_everywhere_is_found_where_names_or_ranges_say_so(make):
    episodes = make()
    for one in episodes:
        one.action[:, 1] *= -1
    finding = found(named(episodes))["action inverted"]
    assert finding.count == 16 and finding.what == "observation/state: y moves against action: y"


def test_a_hand_that_is_turned_over_has_two_axes_inverted():
    episodes = sound(length=60)
    for one in episodes[:5]:
        one.action[:, :2] *= -1
    assert not found(named(episodes))
    for one in episodes[5:]:
        one.action[:, :2] *= -1
    assert not found(named(episodes))


def test_an_arm_that_is_pushed_back_by_what_it_touches_is_not_inverted():
    episodes = sound(length=60)
    pushed = episodes[6]
    pushed.state[:, 0] = pushed.state[0, 0] + 1e-3 * np.sin(np.arange(len(pushed.state)))
    pushed.state[:, 1] = pushed.state[0, 1] - 0.1 * np.cumsum(pushed.action[:, 1])
    pushed.state[:, 2] = 0.3
    pushed.action[:, 2] = 0
    assert "action inverted" not in found(InMemory(episodes))


@pytest.mark.parametrize("length", [1, 2, 5])
def test_episodes_shorter_than_the_lags_have_correlations_of_what_there_is(length):
    values = np.random.default_rng(0).normal(size=(length, 3))
    values -= values.mean(axis=0)
    found = following_measures.correlations(values, values, np.array([0]), np.array([length]), np.arange(-6, 9))
    assert found.shape == (1, 3, 15) and np.isfinite(found).all()
    assert np.allclose(found[0, :, 6], 1.0 if length > 1 else 0.0)
    assert not found[0, :, 6 + length :].any()
