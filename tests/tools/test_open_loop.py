"""Open-loop errors of a scripted policy: none where it says what was done, the known ones where it is a step late."""

import dataclasses

import numpy as np
import pytest

from openpi_train.data.make.fake import FakeData
from openpi_train.data.robot.windows import Windows, WindowShape
from openpi_train.policy.policy import Policy
from openpi_train.robots.bridge import Bridge
from openpi_train.tools import open_loop

HORIZON, EPISODE = 4, 1


@pytest.fixture(scope="module")
def windows():
    return Windows(
        source=FakeData(num_episodes=3, episode_length=12).open(),
        robot=Bridge(cameras={}),
        shape=WindowShape(horizon=HORIZON),
    )


def recorded(windows):
    """What was done in the episode, and the number of its first step in the dataset."""
    first, end = (int(windows.source.episode_ends[EPISODE - 1 + number]) for number in (0, 1))
    return windows.steps.actions[first:end].astype(np.float64), first


def scripted(windows, late):
    """Says what was done `late` steps after those that it is asked about, and checks what it is shown."""
    actions, first = recorded(windows)

    class Scripted(Policy):
        def infer_batch(self, observations, *, draws=None):
            for observation, step in zip(observations, draws, strict=True):
                np.testing.assert_array_equal(observation["state"], windows.steps.state[step])
            told = [np.arange(step - first, step - first + HORIZON) + late for step in draws]
            return [{"actions": actions[np.minimum(places, len(actions) - 1)]} for places in told]

    return object.__new__(Scripted)


@pytest.mark.parametrize("late", [0, 1, 2])
@pytest.mark.parametrize("batch_size", [2, 100])
def test_each_control_step_is_compared_with_what_was_done_then(windows, late, batch_size):
    mean = np.linspace(-1, 1, 7)
    predicted = open_loop.predict(scripted(windows, late), windows, EPISODE, batch_size, mean)
    error, (actions, _) = predicted.sums, recorded(windows)
    start = min(predicted.chunks)  # Bridge's null first actions start no chunk
    places = np.arange(start, len(actions))
    difference = actions[np.minimum(places + late, len(actions) - 1)] - actions[places]
    assert error["count"] == len(places) and sorted(predicted.chunks) == list(range(start, len(actions), HORIZON))
    np.testing.assert_allclose(error["absolute"], np.abs(difference).sum(0), rtol=1e-12)
    np.testing.assert_allclose(error["squared"], (difference**2).sum(0), rtol=1e-12)
    np.testing.assert_allclose(error["squared_of_mean_action"], ((mean - actions[places]) ** 2).sum(0), rtol=1e-12)
    assert (np.array(error["absolute"]) == 0).all() == (late == 0)


def test_the_summary_is_over_all_control_steps_and_beside_it_stands_the_mean_action():
    def of(episode, predicted, recorded, mean):
        predicted, recorded, mean = (np.array(values) for values in (predicted, recorded, mean))
        difference = predicted - recorded
        parts = {"absolute": np.abs(difference), "squared": difference**2}
        parts["squared_of_mean_action"] = (mean - recorded) ** 2
        return {"episode": episode, "count": len(recorded), **{name: part.sum(0) for name, part in parts.items()}}

    # The second dim was 7 in all of the training data, and is not part of the whole.
    mean, deviation = [1.0, 7.0], np.array([0.5, 0.0])
    long = of(7, [[1, 7], [0, 7], [3, 7]], [[0, 7], [2, 7], [3, 7]], mean)
    found = open_loop.summary(["x_m", "still"], [long, of(2, [[9, 8]], [[5, 7]], mean)], deviation)
    assert found["episodes"] == [2, 7] and found["control_steps"] == 4
    # Errors 1, -2, 0, 4; those of the mean action, 1, are 1, -1, -2, -4.
    of_mean = np.sqrt(22 / 4)
    assert found["dims"]["x_m"] == pytest.approx(
        {"mean_absolute": 7 / 4, "rms": np.sqrt(21 / 4), "rms_of_mean_action": of_mean}
    )
    assert found["dims"]["still"] == pytest.approx({"mean_absolute": 1 / 4, "rms": 1 / 2, "rms_of_mean_action": 0})
    assert found["overall"] == pytest.approx({"rms": np.sqrt(21 / 4) / 0.5, "rms_of_mean_action": of_mean / 0.5})
    assert found["verdict"] == "no better than the mean action of the training data: it has not learned"
    assert found["verdict"] in open_loop.table(found)


def test_the_mean_action_is_that_of_the_training_data_whatever_is_evaluated(windows):
    """Training actions are 1 and 3, evaluated ones 10 in every dim: the mean action is 2, and 8 away."""
    training = dataclasses.replace(windows, held_out=FakeData(num_episodes=1, episode_length=12, seed=1).open())
    held_out = training.in_split("validation")
    half = training.source.num_steps // 2
    values = np.repeat([1.0, 3.0], [half, training.source.num_steps - half])
    for one, actions in ((training, values), (held_out, np.full(held_out.source.num_steps, 10.0))):
        steps = windows.steps if one is training else held_out.steps
        told = np.repeat(actions[:, None], 7, axis=1).astype(np.float32)
        one.__dict__["steps"] = dataclasses.replace(steps, actions=told, use=np.ones(len(told), bool))
    one_step = dataclasses.replace(training, shape=WindowShape(horizon=1))  # no step is in more chunks than another
    one_step.__dict__["steps"] = training.steps
    actions = open_loop.TrainingActions.of(one_step)
    share = half / training.source.num_steps
    np.testing.assert_allclose(actions.mean, share * 1 + (1 - share) * 3)
    np.testing.assert_allclose(actions.deviation, 2 * np.sqrt(share * (1 - share)))

    class Zero(Policy):
        def infer_batch(self, observations, *, draws=None):
            return [{"actions": np.zeros((HORIZON, 7))} for _ in observations]

    predicted = open_loop.predict(object.__new__(Zero), held_out, 0, 4, np.full(7, 2.0))
    found = open_loop.summary(windows.robot.action_names, [predicted.sums], np.ones(7))
    assert found["overall"] == {"rms": 10.0, "rms_of_mean_action": 8.0}
    said = "worse than the mean action of the training data by a factor 1.25: it has not learned"
    assert found["verdict"] == said


@pytest.mark.parametrize(
    ("episodes", "settings", "words"),
    [
        ([3], {}, "1 held-out episode, 9 control steps"),
        ([3, 5], {"data": None, "only": "moving"}, "2 held-out episodes, 9 control steps where moving is true"),
        ([3, 5], {"data": "data/new", "only": None}, "2 episodes of data/new, 9 control steps"),
    ],
)
def test_what_was_evaluated_is_said(episodes, settings, words):
    assert open_loop.counted({"episodes": episodes, "control_steps": 9}, settings) == words
