"""A LeRobot dataset that grows by parts: what is in it after parts, kills and parts that are made again."""

import numpy as np
import pyarrow.parquet as pq
import pytest
from test_lerobot_writer import TOY, contents, info_of, toy_episode

from openpi_train.data.core import files, image
from openpi_train.data.formats.lerobot import LeRobot
from openpi_train.data.formats.lerobot.lerobot_parts import LeRobotParts

TASKS = ("pick it", "place it")
# Episodes of each part.
PARTS = ((0, 1), (2, 3, 4), (), (5,))


def parts_at(path, **changes):
    settings = {"fps": 5, "features": TOY, "tasks": TASKS, "robot_type": "toy", "identity": {"run": "x"}}
    return LeRobotParts(path, **{**settings, **changes})


def add(writers, part, numbers, totals):
    """Add these episodes, which the writers share out; the first one publishes. Returns the new totals."""
    names = [f"n{number}" for number in numbers]
    for number, name in zip(numbers, names, strict=True):
        columns, frames = toy_episode(number, length=3 + number)
        pictures = {camera: [image.encode(frame, "png") for frame in these] for camera, these in frames.items()}
        writers[number % len(writers)].draft(part, name, columns, pictures, task=TASKS[number % 2])
    episode, step = totals
    for place, (number, name) in enumerate(zip(numbers, names, strict=True)):
        writers[number % len(writers)].place(part, name, number=place, episode=episode, first_step=step)
        episode, step = episode + 1, step + 3 + number
    writers[0].publish(part, names)
    return episode, step


def written(path, upto=None, num_writers=1):
    writers = [parts_at(path) for _ in range(num_writers)]
    totals = writers[0].begin(0)
    for part, numbers in enumerate(PARTS[:upto]):
        totals = add(writers, part, numbers, totals)
    return writers, totals


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    path = tmp_path_factory.mktemp("straight") / "kept"
    written(path)
    return path


def opened(path, cache):
    return LeRobot(path=str(path), cache_dir=str(cache)).open()


def assert_holds(source, numbers):
    """The dataset has exactly these episodes, in this order."""
    assert np.diff([0, *source.episode_ends]).tolist() == [3 + number for number in numbers]
    for place, number in enumerate(numbers):
        columns, frames = toy_episode(number, length=3 + number)
        steps = source.steps_of(place)
        for name, column in columns.items():
            np.testing.assert_array_equal(source.columns[name.replace(".", "/")][steps.start : steps.stop], column)
        seen = source.frames(np.arange(steps.start, steps.stop), "observation/images/top")
        np.testing.assert_array_equal(seen, frames["observation.images.top"])
        prompts = source.prompt_index[steps.start : steps.stop]
        assert {str(source.prompts[one]) for one in prompts} == {TASKS[number % 2]}


def test_every_episode_is_there_once_with_lossless_pictures(straight, tmp_path):
    source = opened(straight, tmp_path)
    assert_holds(source, range(6))
    assert source.about().control_hz == 5 and source.about().robot_type == "toy"
    info = info_of(straight)
    assert (info["total_episodes"], info["total_frames"], info["splits"]) == (6, 33, {"train": "0:6"})
    rows = [row for path in sorted(straight.glob("data/*/*.parquet")) for row in pq.read_table(path).to_pylist()]
    assert [row["index"] for row in rows] == list(range(33)) and [row["timestamp"] for row in rows][:2] == [
        0,
        np.float32(0.2),
    ]
    stats = files.read_json(straight / "meta/stats.json")["action"]
    actions = np.concatenate([toy_episode(number, length=3 + number)[0]["action"] for number in range(6)])
    np.testing.assert_allclose(stats["mean"], actions.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(stats["std"], actions.std(axis=0), rtol=1e-5)


def test_who_writes_which_episode_changes_no_byte(straight, tmp_path):
    written(tmp_path / "kept", num_writers=2)
    assert contents(tmp_path / "kept") == contents(straight)


def test_a_part_that_is_made_again_replaces_itself_and_later_ones(straight, tmp_path):
    path = tmp_path / "kept"
    (writer, *_), _ = written(path)
    writer.draft(4, "left", *_encoded(9), task=TASKS[0])
    writers = [parts_at(path)]
    totals = writers[0].begin(1)
    assert totals == (2, 7) and info_of(path)["total_episodes"] == 2
    assert_holds(opened(path, tmp_path / "before"), range(2))
    for part, numbers in list(enumerate(PARTS))[1:]:
        totals = add(writers, part, numbers, totals)
    assert contents(path) == contents(straight)


def _encoded(number):
    columns, frames = toy_episode(number)
    return columns, {camera: [image.encode(frame, "png") for frame in these] for camera, these in frames.items()}


@pytest.mark.parametrize("survived", range(14))
def test_a_kill_at_any_write_leaves_whole_parts(straight, tmp_path, monkeypatch, survived):
    """The second part has thirteen writes before the last one, which makes it part of the dataset."""
    path = tmp_path / "kept"
    writers, totals = written(path, upto=1)
    left, write = iter(range(survived)), files.write_bytes

    def dying(*arguments):
        if next(left, None) is None:
            raise KeyboardInterrupt
        write(*arguments)

    monkeypatch.setattr(files, "write_bytes", dying)
    with pytest.raises(KeyboardInterrupt):
        add(writers, 1, PARTS[1], totals)
    monkeypatch.undo()
    assert_holds(opened(path, tmp_path / "before"), range(2))
    writers = [parts_at(path)]
    totals = writers[0].begin(1)
    for part, numbers in list(enumerate(PARTS))[1:]:
        totals = add(writers, part, numbers, totals)
    assert contents(path) == contents(straight)


def test_part_0_sets_an_older_dataset_aside(tmp_path, straight, caplog):
    written(tmp_path / "kept")
    written(tmp_path / "kept", upto=1)
    aside = [path for path in tmp_path.iterdir() if path.name != "kept"]
    assert len(aside) == 1 and contents(aside[0]) == contents(straight) and str(aside[0]) in caplog.text
    assert info_of(tmp_path / "kept")["total_episodes"] == 2


def test_what_is_not_this_dataset_is_refused(tmp_path):
    written(tmp_path / "kept", upto=1)
    with pytest.raises(ValueError, match="begun with other identity: give the same again"):
        parts_at(tmp_path / "kept", identity={"run": "y"}).claim()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="mine holds something else: give another folder"):
        parts_at(tmp_path / "mine").claim()
