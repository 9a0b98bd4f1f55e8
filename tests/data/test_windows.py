import pickle

import numpy as np
import pytest

from openpi_train.data.fake import FakeData
from openpi_train.data.windows import Windows, validation_episodes
from openpi_train.robots.bridge import Bridge

SOURCE = FakeData(num_episodes=7, episode_length=6, image_height=8, image_width=8, seed=5).open()


def episode_of(source, step):
    """(first step, end) of the episode that holds a step, by walking."""
    start = 0
    for end in source.episode_ends:
        if step < end:
            return start, int(end)
        start = int(end)
    raise AssertionError


@pytest.mark.parametrize("trajectory", [False, True])
@pytest.mark.parametrize("history", [1, 3])
def test_rows_equal_windows_cut_by_hand(trajectory, history):
    robot = Bridge(trajectory=trajectory)
    windows = Windows(source=SOURCE, robot=robot, horizon=5, history=history)
    steps = robot.read(SOURCE.columns, SOURCE.episode_ends)
    assert len(windows) == SOURCE.num_steps
    for sample, start in enumerate(windows.starts):
        first, end = episode_of(SOURCE, start)
        row = windows.row(sample)
        for offset in range(5):
            action = steps.actions[min(start + offset, end - 1)].copy()
            if trajectory:
                action[:6] -= steps.state[start, :6]
            np.testing.assert_allclose(row["actions"][offset], action, atol=1e-6)
            assert row["action_mask"][offset] == (start + offset < end)
        past = [max(first, start - back) for back in reversed(range(history))]
        frames = SOURCE.frames(np.array(past), "observation/image_0")
        state = steps.state[past]
        assert np.array_equal(row["image/base_0_rgb"], frames if history > 1 else frames[0])
        assert np.array_equal(row["state"], state if history > 1 else state[0])
        assert row["image_mask/base_0_rgb"]
        assert row["prompt"] == SOURCE.prompts[SOURCE.prompt_index[start]]


def test_steps_that_must_not_start_a_window_start_none():
    source = FakeData(num_episodes=3, episode_length=6).open()
    source.columns["action"][int(source.episode_ends[0])] = 0.0
    windows = Windows(source=source, robot=Bridge(), horizon=2)
    assert len(windows) == source.num_steps - 1
    assert int(source.episode_ends[0]) not in windows.starts


def test_splits_part_the_episodes():
    train = Windows(source=SOURCE, robot=Bridge(), horizon=2, validation_fraction=0.4)
    held_out = train.in_split("validation")
    assert len(held_out) > 0
    assert np.array_equal(np.sort(np.concatenate([train.starts, held_out.starts])), np.arange(SOURCE.num_steps))
    episodes = [set(np.searchsorted(SOURCE.episode_ends, w.starts, side="right")) for w in (train, held_out)]
    assert not episodes[0] & episodes[1]


def test_the_split_follows_the_content_of_episodes():
    names = [f"episode {number}" for number in range(400)]
    held_out = validation_episodes(names, 0.25)
    assert 70 < held_out.sum() < 130  # binomial: mean 100, standard deviation 8.7
    assert np.array_equal(validation_episodes(names[::-1], 0.25), held_out[::-1])
    assert np.array_equal(validation_episodes([*names, *names, "new"], 0.25)[:800], np.tile(held_out, 2))
    assert np.all(validation_episodes(names, 0.5)[held_out])


@pytest.mark.parametrize(
    ("names", "fraction", "expected"),
    [(["a", "a"], 0.5, 0), (["a", "b"], 1e-9, 1), (["a", "b"], 1 - 1e-9, 1), (["a", "b"], 0.0, 0), ([], 0.5, 0)],
)
def test_small_datasets_hold_out_one_distinct_episode_where_they_can(names, fraction, expected):
    assert validation_episodes(names, fraction).sum() == expected


def test_a_fraction_of_one_is_refused():
    with pytest.raises(ValueError, match=r"validation_fraction 1.0 must be in \[0, 1\)"):
        validation_episodes(["a"], 1.0)


def test_windows_are_small_when_pickled_and_the_same_afterwards():
    windows = Windows(source=SOURCE, robot=Bridge(), horizon=3, prompt="stack")
    again = pickle.loads(pickle.dumps(windows))
    assert np.array_equal(again.starts, windows.starts)
    assert np.array_equal(again.row(4)["actions"], windows.row(4)["actions"])
    assert again.row(4)["prompt"] == "stack"
    assert "steps" not in windows.__getstate__()


def test_a_camera_that_the_dataset_lacks_is_named():
    with pytest.raises(ValueError, match=r"'observation/wrist'.*it has observation/image_0"):
        Windows(source=SOURCE, robot=Bridge(cameras={"base_0_rgb": "observation/wrist"}), horizon=3)
