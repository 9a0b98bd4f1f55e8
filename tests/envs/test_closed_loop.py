"""Closed loops: which episodes there are, that batches and shares of processes change none, videos that play."""

import dataclasses

import av
import following
import jax
import numpy as np
import pytest
from test_rollout import Counter

from openpi_train.envs import video
from openpi_train.envs.closed_loop import ClosedLoop, episode_keys, evaluate, protocol


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewTasks(Counter):
    @property
    def tasks(self):
        return ("reach_0", "reach_1", "reach_2")


def noisy(observation, keys):
    """Each row's actions are its own key's."""
    return np.asarray(jax.vmap(lambda key: jax.random.uniform(key, (4, 1)))(keys))


CONFIG = ClosedLoop(env=FewTasks(), episodes_per_task=3, max_steps=3)


def test_an_episodes_key_is_of_its_task_and_rollout_whatever_else_is_run():
    keys = jax.random.key_data(episode_keys(CONFIG, np.arange(9)))
    assert len({tuple(key) for key in keys.tolist()}) == 9
    more = dataclasses.replace(CONFIG, env=Counter(), episodes_per_task=50)  # the same tasks among others
    same = jax.random.key_data(episode_keys(more, np.array([20, 21, 22])))
    assert same.tolist() == keys[3:6].tolist()
    other = jax.random.key_data(episode_keys(dataclasses.replace(CONFIG, seed=CONFIG.seed + 1), np.arange(9)))
    assert not {tuple(key) for key in keys.tolist()} & {tuple(key) for key in other.tolist()}


@pytest.mark.slow
def test_batches_change_no_episode_and_a_share_of_rows_is_that_share():
    whole = evaluate(lambda: noisy, CONFIG, execute=2)
    assert whole is not None and [episode.number for episode in whole.episodes] == list(range(9))
    assert {episode.steps for episode in whole.episodes} >= {1, 2, 3}
    assert evaluate(lambda: noisy, CONFIG, execute=2, batch_size=4) == whole
    # The second of two processes in batches of four: its episodes, and one along the way that does not count.
    share = evaluate(lambda: noisy, CONFIG, execute=2, batch_size=4, rows=np.array([2, 3]))
    assert share is not None and share.episodes == tuple(whole.episodes[number] for number in (2, 3, 6, 7))


def test_chosen_tasks_have_the_episodes_that_they_have_among_all():
    whole = evaluate(lambda: noisy, CONFIG, execute=2)
    chosen = evaluate(lambda: noisy, dataclasses.replace(CONFIG, tasks=("2", "reach_1")), execute=2)
    assert whole is not None and chosen is not None
    assert [episode.task for episode in chosen.episodes] == ["reach_2", "reach_1"] * 3

    def ends(score, task):
        return [(episode.success, episode.steps) for episode in score.episodes if episode.task == task]

    assert all(ends(chosen, task) == ends(whole, task) for task in ("reach_1", "reach_2"))


class Climbing:
    """Says 10 n, 10 n + 1, 10 n + 2 at its n-th question: it remembers, so every batch needs one of its own."""

    def __init__(self):
        self.asked = 0

    def __call__(self, observation, keys):
        self.asked += 1
        chunk = 10.0 * self.asked + np.arange(3.0)
        return np.broadcast_to(chunk[:, None], (len(keys), 3, 2))


def test_a_table_says_how_its_episodes_were_run():
    config = ClosedLoop(env=following.Follow(), episodes_per_task=5, seed=3, max_steps=6)
    told = protocol(config, execute=2)
    rate = following.Follow.control_hz
    assert told == f"5 episodes per task from seed 3; at most 6 control steps at {rate:g} Hz; a new chunk after 2"


@pytest.mark.parametrize("batch_size", [None, 1, 4])
@pytest.mark.parametrize(
    ("chosen", "ends"),
    # Carried out are 10, 11, 20, 21, 30, 31, or 10, 11, 12, 20, 21, 22: there are six control steps.
    [({}, [1, 3, 5, None]), ({"execute": 3}, [1, 3, 6, None])],
    ids=["execute_2", "execute_3"],
)
def test_a_scripted_policy_has_the_score_that_is_known(batch_size, chosen, ends):
    env = following.Follow(goals=(9.5, 11.5, 21.5, 31.0))
    config = ClosedLoop(env=env, episodes_per_task=2, max_steps=6, **chosen)
    score = evaluate(Climbing, config, execute=2, batch_size=batch_size)
    assert score is not None
    found = [(episode.number, episode.task, episode.success, episode.steps) for episode in score.episodes]
    known = [(task, end is not None, end or 6) for task, end in zip(env.tasks, ends, strict=True)]
    assert found == [(number, *known[number % 4]) for number in range(8)]


def test_a_request_to_stop_leaves_no_score():
    assert evaluate(lambda: noisy, CONFIG, execute=2, stop_requested=lambda: True) is None


def onwards(observation, keys):
    return np.ones((len(keys), 2, 1))


class Painted(FewTasks):
    """Two cameras, of which the second shows the state as a grey."""

    def pictures(self, states, rows):
        grey = (40 * states[0][rows]).astype(np.uint8)[:, None, None, None]
        return {"a": np.zeros((len(rows), 16, 8, 3), np.uint8), "b": np.broadcast_to(grey, (len(rows), 8, 8, 3))}


def test_videos_show_every_control_step_of_the_first_episodes(tmp_path, monkeypatch):
    config = dataclasses.replace(CONFIG, env=Painted(), num_videos=2, max_steps=2)
    recorder = video.VideoRecorder(config.env, config.num_videos, tmp_path)
    evaluate(lambda: onwards, config, execute=2, recorder=recorder, batch_size=3)
    paths = recorder.write()
    assert [path.name for path in paths] == ["000_reach_0_success.mp4", "001_reach_1_success.mp4"]
    with av.open(str(paths[1])) as file:
        frames = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
    assert [frame.shape for frame in frames] == [(192, 192, 3)] * 3
    for steps, frame in enumerate(frames):  # the lower half of the second picture is filling; H.264 rounds
        assert abs(frame[48, 144].astype(int) - 40 * steps).max() <= 4
        assert frame[144].max() <= 4 and frame[:, :90].max() <= 4
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert video.write_video(tmp_path / "plain", frames, 5.0).suffix == ".gif"


def test_a_world_that_draws_nothing_has_no_video(tmp_path, caplog):
    recorder = video.VideoRecorder(CONFIG.env, 2, tmp_path)
    evaluate(lambda: noisy, CONFIG, execute=2, recorder=recorder)
    assert recorder.write() == [] and not list(tmp_path.iterdir())
