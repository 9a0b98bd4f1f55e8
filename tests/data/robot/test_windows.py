import itertools
import logging
import pickle

import numpy as np
import pytest

from openpi_train.data.core.held_out import validation_episodes
from openpi_train.data.formats.lerobot import LeRobot, LeRobotWriter
from openpi_train.data.make.fake import FakeData
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.data.robot.windows import Windows, WindowShape
from openpi_train.robots.bridge import Bridge
from openpi_train.robots.numbered import Numbered

SOURCE = FakeData(num_episodes=7, episode_length=6, image_height=8, image_width=8, seed=5).open()
SHAPE = WindowShape(horizon=3)


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
    windows = Windows(source=SOURCE, robot=robot, shape=WindowShape(horizon=5, history=history))
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
    windows = Windows(source=source, robot=Bridge(), shape=WindowShape(horizon=2))
    assert len(windows) == source.num_steps - 1
    assert int(source.episode_ends[0]) not in windows.starts


def test_splits_part_the_episodes():
    train = Windows(source=SOURCE, robot=Bridge(), shape=WindowShape(horizon=2), validation_fraction=0.4)
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
    windows = Windows(source=SOURCE, robot=Bridge(), shape=WindowShape(horizon=3), prompt="stack")
    again = pickle.loads(pickle.dumps(windows))
    assert np.array_equal(again.starts, windows.starts)
    assert np.array_equal(again.row(4)["actions"], windows.row(4)["actions"])
    assert again.row(4)["prompt"] == "stack"
    assert "steps" not in windows.__getstate__()


def test_a_camera_that_the_dataset_lacks_is_named():
    with pytest.raises(ValueError, match=r"'observation/wrist'.*it has observation/image_0"):
        Windows(source=SOURCE, robot=Bridge(cameras={"base_0_rgb": "observation/wrist"}), shape=SHAPE)


def published_windows(episode_ends, horizon, pad_before, pad_after):
    """The rows of every window as diffusion policy's sampler defines them: list of [horizon] step numbers.

    Written anew from its definition: the window's rows that lie in the episode, the first and the last one repeated.
    """
    windows, first = [], 0
    for end in episode_ends:
        for start in range(-min(pad_before, horizon - 1), end - first - horizon + min(pad_after, horizon - 1) + 1):
            rows = [first + start + offset for offset in range(horizon) if 0 <= start + offset < end - first]
            before = max(0, -start)
            windows.append([rows[0]] * before + rows + [rows[-1]] * (horizon - before - len(rows)))
        first = int(end)
    return windows


# Stanford's, RoboTwin's and lerobot's settings; no padding at all; and episodes that are shorter than the horizon.
@pytest.mark.parametrize(
    ("horizon", "history", "executed"), [(16, 2, 8), (8, 3, 6), (4, 1, 1), (5, 2, 1), (3, 3, 1), (40, 2, 39)]
)
def test_windows_of_diffusion_policy_are_those_of_its_sampler(horizon, history, executed):
    source = FakeData(num_episodes=9, episode_length=14, image_height=2, image_width=2).open()
    pads = history - 1, executed - 1
    shape = WindowShape(
        horizon=horizon, history=history, first_action=1 - history, pad_before=pads[0], pad_after=pads[1]
    )
    windows = Windows(source=source, robot=Bridge(cameras={}), shape=shape)
    expected = published_windows(source.episode_ends, horizon, *pads)
    lengths = np.diff(source.episode_ends, prepend=0)
    assert len(windows) == np.maximum(lengths - horizon + 1 + sum(pads), 0).sum() == len(expected)
    steps = windows.steps
    for sample, rows in enumerate(expected):
        row = windows.row(sample)
        np.testing.assert_array_equal(row["actions"], steps.actions[rows])
        observed = steps.state[rows[:history]]
        np.testing.assert_array_equal(row["state"], observed if history > 1 else observed[0])
        repeated = [later == earlier for earlier, later in itertools.pairwise(rows)]
        assert (~row["action_mask"]).sum() == sum(repeated)  # the mask says which ones repeat, loss or no loss
        assert len({*windows.bounds(np.array(rows))[0]}) == 1


def test_a_present_step_outside_the_episode_is_refused():
    with pytest.raises(ValueError, match=r"pad_after 12 must be in 0\.\.11"):
        WindowShape(horizon=16, history=5, first_action=-4, pad_after=12)
    with pytest.raises(ValueError, match=r"first_action 1 must be in -7\.\.0"):
        WindowShape(horizon=8, first_action=1)


def marked(marks, **shape):
    """Windows of three episodes, six, five and five steps, of which only marked ones are learned; action k is all k."""
    source = FakeData(num_episodes=3, episode_length=5, image_height=8, image_width=8).open()
    assert source.episode_ends.tolist() == [6, 11, 16]
    source.columns["action"] = np.repeat(np.arange(16, dtype=np.float32)[:, None], 7, axis=1)
    source.columns["is_intervention"] = np.array(marks)
    return Windows(source=source, robot=Bridge(), shape=WindowShape(**shape), only="is_intervention")


def test_chunks_begin_at_marked_steps_and_end_with_the_marks_or_the_episode():
    marks = [0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 0, 1, 1, 1]
    # Worked out by hand: the actions of each chunk of three, and how many of them are real.
    expected = {2: ([2, 3, 3], 2), 3: ([3, 3, 3], 1), 10: ([10, 10, 10], 1), 11: ([11, 11, 11], 1)}
    expected |= {13: ([13, 14, 15], 3), 14: ([14, 15, 15], 2), 15: ([15, 15, 15], 1)}
    for given in (np.array(marks, bool), np.array(marks, np.int64), np.array(marks, np.float32)[:, None]):
        windows = marked(given, horizon=3)
        assert windows.starts.tolist() == list(expected)
        _, actions, real = windows.chunks(np.arange(len(windows)))
        assert actions[..., 0].tolist() == [chunk for chunk, _ in expected.values()]
        assert real.sum(axis=1).tolist() == [count for _, count in expected.values()]
    again = pickle.loads(pickle.dumps(windows))
    assert again.starts.tolist() == list(expected)


def test_what_is_seen_before_a_marked_step_need_not_be_marked():
    windows = marked([0, 0, 1, 1, 1, *[0] * 11], horizon=3, history=2, first_action=-1)
    assert windows.starts.tolist() == [2, 3, 4]
    row = windows.row(0)
    assert row["actions"][:, 0].tolist() == [2, 2, 3] and row["action_mask"].tolist() == [False, True, True]
    assert np.array_equal(row["state"], windows.steps.state[[1, 2]])


@pytest.mark.parametrize(
    ("marks", "message"),
    [
        ([2, *[0] * 15], "int64 with other values than 0 and 1"),
        ([[0, 1]] * 16, r"has \[2\] values per step, not one boolean"),
        ([False] * 16, "true at no step"),
    ],
)
def test_a_feature_that_marks_nothing_is_refused(marks, message):
    with pytest.raises(ValueError, match=rf"--data\.datasets\.N\.only is_intervention: .*{message}"):
        marked(marks, horizon=3)


def test_a_missing_feature_is_refused_and_boolean_ones_are_named():
    source = FakeData(num_episodes=2).open()
    source.columns["is_success"] = np.ones(source.num_steps, bool)
    with pytest.raises(ValueError, match=r"only is_intervention: .* no such feature; its boolean ones are is_success"):
        Windows(source=source, robot=Bridge(), shape=SHAPE, only="is_intervention")


@pytest.fixture
def corrected(tmp_path):
    """A LeRobot dataset of three episodes with a boolean feature per step."""
    features = {
        "observation.state": {"dtype": "float32", "shape": (2,), "names": ["x", "y"]},
        "action": {"dtype": "float32", "shape": (2,), "names": ["x", "y"]},
        "is_intervention": {"dtype": "bool", "shape": (1,), "names": None},
    }
    writer = LeRobotWriter(tmp_path / "arm", fps=10, features=features)
    for marks in ([0, 1, 1, 0], [0, 0, 0], [1, 0, 1]):
        moves = np.arange(2 * len(marks), dtype=np.float32).reshape(-1, 2)
        flags = np.array(marks, bool)[:, None]
        writer.add_episode({"observation.state": moves, "action": moves, "is_intervention": flags}, {}, task="reach")
    writer.finish()
    return LeRobot(path=str(tmp_path / "arm"), cache_dir=str(tmp_path / "cache"))


POINT = Numbered(num_state_dims=2, num_action_dims=2, rate_hz=10.0, cameras={}, state_columns=("observation/state",))


def test_a_lerobot_datasets_boolean_feature_marks_what_is_learned(corrected):
    windows = Windows(source=corrected.open(), robot=POINT, shape=WindowShape(horizon=2), only="is_intervention")
    assert windows.starts.tolist() == [1, 2, 7, 9]
    _, _, real = windows.chunks(np.arange(4))
    assert real.tolist() == [[True, True], [True, False], [True, False], [True, False]]


def test_what_is_learned_is_part_of_the_rows_identity_and_has_its_own_norm_stats(corrected, open_small, caplog):
    def opened(only):
        dataset = Dataset(source=corrected, robot=POINT, asset_id="arm", only=only)
        with caplog.at_level(logging.INFO):
            return open_small(DataConfig(datasets=(dataset,), validation_fraction=0.0))

    whole, marked = opened(None), opened("is_intervention")
    assert "only" not in whole.train.identity["datasets"][0]
    assert marked.train.identity["datasets"][0]["only"] == "is_intervention"
    assert (whole.num_samples, marked.num_samples) == (10, 4) and "changed since" in caplog.text
