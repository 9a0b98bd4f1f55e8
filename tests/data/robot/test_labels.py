"""Labels of stored steps: returns by hand, which episodes succeed, and the indicator of a file."""

import dataclasses

import numpy as np
import pytest

from openpi_train.data.robot.advantage_file import write_advantages
from openpi_train.data.robot.labels import (
    BETTER,
    WORSE,
    Indicator,
    Returns,
    boolean_feature,
    episode_successes,
    longest_episodes,
)
from openpi_train.sampling import indicator


@dataclasses.dataclass
class Stored:
    """Three episodes of 3, 2 and 4 steps: to lift, to push, to lift."""

    columns: dict
    fingerprint: str = "this one"
    prompts: tuple = ("lift", "push")

    def __post_init__(self):
        self.episode_ends, self.num_steps, self.num_episodes = np.array([3, 5, 9]), 9, 3
        self.prompt_index = np.array([0, 0, 0, 1, 1, 0, 0, 0, 0])


SUCCESS = np.array([0, 0, 1, 0, 0, 0, 0, 0, 1], bool)


def test_a_return_is_what_is_left_to_do_and_more_if_it_fails():
    """In lengths of the task's longest episode, divided by the most that it can be: here 4 and 2 steps, times 1.5."""
    source = Stored({"next/success": SUCCESS})
    longest = longest_episodes([(source, None)])
    assert longest == {"lift": 4, "push": 2}
    found = Returns(success=None, failure_cost=0.5, longest=longest).of(source, None)
    to_go = np.array([2, 1, 0, 1 + 0.5 * 2, 0 + 0.5 * 2, 3, 2, 1, 0])
    np.testing.assert_allclose(found, -to_go / (1.5 * np.array([4, 4, 4, 2, 2, 4, 4, 4, 4])), rtol=1e-6)
    assert found.dtype == np.float32 and found.min() > -1
    # One instruction for all episodes makes them one task.
    assert longest_episodes([(source, "do"), (source, None)]) == {"do": 4, "lift": 4, "push": 2}


def test_what_says_that_an_episode_succeeds():
    reward = np.array([0, 0, 1.0, 0, 0, 5.0, 0, 0, 0])
    both = Stored({"next/success": SUCCESS, "next/reward": reward, "won": ~SUCCESS, "state": np.zeros((9, 2))})
    np.testing.assert_array_equal(episode_successes(both, None), [True, False, True])
    np.testing.assert_array_equal(episode_successes(both, "next.success"), [True, False, True])
    np.testing.assert_array_equal(episode_successes(both, "won"), [True, True, True])
    np.testing.assert_array_equal(episode_successes(both, "all"), [True, True, True])
    # A reward counts at the last step.
    np.testing.assert_array_equal(episode_successes(Stored({"next/reward": reward}), None), [True, False, False])
    with pytest.raises(ValueError, match=r"next\.success: the dataset has no such feature; .* \(none\)"):
        episode_successes(Stored({}), None)
    with pytest.raises(ValueError, match=r"--always state: the feature has \[2\] values per step"):
        boolean_feature(both, "state", "--always")


def test_an_indicator_is_read_from_a_file_of_this_dataset(tmp_path):
    source, is_better, path = Stored({}), np.arange(9) % 3 == 0, tmp_path / "made" / "a.parquet"
    write_advantages(path, source, *np.zeros((3, 9)), is_better)
    found = Indicator(file=str(path)).of(source, None)
    np.testing.assert_array_equal(found, np.where(is_better, indicator.BETTER, indicator.WORSE))
    assert (BETTER, WORSE) == (indicator.BETTER, indicator.WORSE)
    assert (Indicator(file=None).of(source, None) == indicator.BETTER).all()
    with pytest.raises(ValueError, match="was made of another dataset"):
        Indicator(file=str(path)).of(Stored({}, fingerprint="another"), None)
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        Indicator(file=str(tmp_path / "none")).of(source, None)
    write_advantages(path, source, *np.zeros((3, 9)), ~is_better)
    assert Indicator(file=str(path)).identity() != {"advantages": None}
