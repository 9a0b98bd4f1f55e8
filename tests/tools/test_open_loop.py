"""Open-loop errors of a scripted policy: none where it says what was done, the known ones where it is a step late."""

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
    predicted = open_loop.predict(scripted(windows, late), windows, EPISODE, batch_size)
    error, (actions, _) = predicted.sums, recorded(windows)
    start = min(predicted.chunks)  # Bridge's null first actions start no chunk
    places = np.arange(start, len(actions))
    difference = actions[np.minimum(places + late, len(actions) - 1)] - actions[places]
    assert error["count"] == len(places) and sorted(predicted.chunks) == list(range(start, len(actions), HORIZON))
    np.testing.assert_allclose(error["absolute"], np.abs(difference).sum(0), rtol=1e-12)
    np.testing.assert_allclose(error["squared"], (difference**2).sum(0), rtol=1e-12)
    assert (np.array(error["absolute"]) == 0).all() == (late == 0)


def test_the_summary_is_over_all_control_steps_and_beside_it_stands_the_best_constant():
    def of(episode, predicted, recorded):
        predicted, recorded = np.array(predicted)[:, None], np.array(recorded)[:, None]
        difference = predicted - recorded
        parts = {"absolute": np.abs(difference), "squared": difference**2}
        parts |= {"recorded": recorded, "recorded_squared": recorded**2}
        return {"episode": episode, "count": len(recorded), **{name: part.sum(0) for name, part in parts.items()}}

    long, short = of(7, [1.0, 0.0, 3.0], [0.0, 2.0, 3.0]), of(2, [9.0], [5.0])
    found = open_loop.summary(["x_m"], [long, short])
    assert found["episodes"] == [2, 7] and found["control_steps"] == 4
    # Errors 1, -2, 0, 4; what was done, 0, 2, 3, 5, lies 2.5, 0.5, 0.5, 2.5 from its mean.
    assert found["dims"]["x_m"] == pytest.approx(
        {"mean_absolute": 7 / 4, "rms": np.sqrt(21 / 4), "rms_of_mean": np.sqrt(13 / 4)}
    )
