"""Datasets of every format into every other, and back: equal columns and pictures, and what is left out by name."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
from rlds_toy import toy_source, write_toy

from openpi_train.data.formats import detection
from openpi_train.data.make.convert import DATASET_WRITERS, convert
from openpi_train.data.make.fake import FakeData
from openpi_train.tools import data as data_tool

LEROBOT = Path(__file__).parents[1] / "formats" / "lerobot" / "fixtures"
ARMS = Path(__file__).parents[1] / "formats" / "zarr" / "fixtures" / "arms_14.zarr"
NUMBERED = {"timestamp", "frame_index", "episode_index", "index", "task_index"}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENPI_TRAIN_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def rlds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rlds")
    return toy_source(write_toy(folder, seeds=range(3)), folder / "cache").open()


def opened(path):
    return detection.source_at(str(path)).open()


def same(a, b, *, columns: set[str], pixels: bool = True) -> None:
    """The columns, the instruction at every step and, where `pixels`, all frames are the same."""
    assert a.episode_ends.tolist() == b.episode_ends.tolist()
    for name in columns:
        np.testing.assert_array_equal(a.columns[name], b.columns[name], strict=True)
    assert [a.prompts[i] for i in a.prompt_index] == [b.prompts[i] for i in b.prompt_index]
    assert set(a.cameras) == set(b.cameras)
    for camera in a.cameras if pixels else ():
        np.testing.assert_array_equal(
            a.frames(np.arange(a.num_steps), camera), b.frames(np.arange(b.num_steps), camera)
        )
    names = a.about().dim_names
    assert {name: names.get(name) for name in columns} == {name: b.about().dim_names.get(name) for name in columns}
    assert a.about().control_hz == b.about().control_hz


@pytest.mark.parametrize("form", [form for form in DATASET_WRITERS if form != "lerobot"])
def test_a_lerobot_dataset_goes_through_every_format_and_comes_back_as_it_was(tmp_path, form):
    source = opened(LEROBOT / "v30_image")
    name = "toy.zarr" if form == "zarr" else "toy"
    account = convert(source, tmp_path / name, form, pictures="as-stored" if form.startswith("lerobot") else None)
    there = opened(tmp_path / name)
    columns = set(source.columns)
    same(source, there, columns=columns)
    assert set(there.columns) - columns == ({"is_first", "is_last"} if form == "rlds" else set())
    assert ("added" in account.text()) == (form == "rlds")
    if form == "rlds":
        assert np.flatnonzero(there.columns["is_first"]).tolist() == [0, *source.episode_ends[:-1]]
        assert np.flatnonzero(there.columns["is_last"]).tolist() == [end - 1 for end in source.episode_ends]
    as_stored = form in ("lerobot-2.1", "steps")
    convert(there, tmp_path / "back", "lerobot", pictures="as-stored" if as_stored else "png")
    back = opened(tmp_path / "back")
    same(source, back, columns=columns)
    assert back.about().dim_names["action"] == (*(f"joint_{n}" for n in range(6)), "gripper")
    for step in (0, 30, 59) if as_stored else ():
        assert back.encoded(step, source.cameras[0]) == source.encoded(step, source.cameras[0])


def test_what_an_rlds_dataset_has_and_the_others_have_not_is_named(rlds, tmp_path):
    with pytest.raises(ValueError, match=r"does not give its control rate.*give --control-hz"):
        convert(rlds, tmp_path / "toy", "lerobot", pictures="as-stored")
    with pytest.raises(ValueError, match=r"the control rate is 16\.7 Hz.*give --control-hz 17"):
        convert(rlds, tmp_path / "toy", "lerobot", pictures="as-stored", control_hz=16.7)
    for none in (0, -5, float("nan")):
        with pytest.raises(ValueError, match="is not a valid rate"):
            convert(rlds, tmp_path / "toy", "lerobot", pictures="as-stored", control_hz=none)
    text = convert(rlds, tmp_path / "toy", "lerobot", pictures="as-stored", control_hz=5).text()
    for name in ("embedding", "observation/depth", "episode_metadata/seed", "episode_metadata/task"):
        assert f"  {name} " in text and "left out" in text
    there = opened(tmp_path / "toy")
    assert there.about().control_hz == 5
    columns = {"observation/state", "action", "counter", "is_first", "is_last", "is_terminal", "reward", "discount"}
    assert set(there.columns) == set(rlds.columns) == columns
    same(dataclass_with_rate(rlds, 5), there, columns=columns)
    assert there.encoded(2, "observation/image_0") == rlds.encoded(2, "observation/image_0")


def dataclass_with_rate(source, control_hz):
    """The source, as if it had said its rate."""
    about = dataclasses.replace(source.about(), control_hz=control_hz)
    copy = type(source).__new__(type(source))
    copy.__dict__.update(source.__dict__, about=lambda: about)
    return copy


@pytest.mark.parametrize("kind", ["av1", "h264", "jpeg"])
def test_lossy_pictures_are_near_and_the_account_says_how_near(tmp_path, kind):
    source = opened(LEROBOT / "v30_image")
    account = convert(source, tmp_path / "toy", "lerobot-2.1", pictures=kind)
    there = opened(tmp_path / "toy")
    same(source, there, columns=set(source.columns), pixels=False)
    steps = np.arange(60)
    for camera in source.cameras:
        error = np.abs(source.frames(steps, camera).astype(int) - there.frames(steps, camera))
        # What lerobot's own encoding of these pictures costs is 2 to 3 of 255 on average.
        assert 0 < error.mean() < 4
    assert f"{kind}, off by" in account.text()


def test_replay_buffers_go_to_lerobot_and_back(tmp_path):
    source = opened(ARMS)
    convert(source, tmp_path / "arms", "lerobot", control_hz=20, pictures="png")
    convert(opened(tmp_path / "arms"), tmp_path / "arms.zarr", "zarr")
    back = opened(tmp_path / "arms.zarr")
    same(dataclass_with_rate(source, 20), back, columns={"state", "action"})
    assert back.about().control_hz == 20


def test_the_verb_says_what_became_of_everything_and_what_to_give(tmp_path, capsys):
    words = ["convert", str(LEROBOT / "v21_video"), str(tmp_path / "toy.zarr"), "--leave-out", "next/done"]
    assert data_tool.main(words, lambda *_: None) == 0
    said = capsys.readouterr().out
    assert "next/done                 left out: as asked (--leave-out)" in said and "10 Hz" in said
    assert set(opened(tmp_path / "toy.zarr").columns) == {"observation/state", "action", "next/reward"}
    for words, message in (
        (["toy2"], "the format of toy2 is not clear"),
        (["toy2", "--to", "rlds", "--leave-out", "force"], "cannot leave out force: the columns are action, "),
        (["toy2", "--to", "rlds", "--pictures", "av1"], "cannot be kept as av1 here; allowed are png, jpeg"),
    ):
        with pytest.raises(Exception, match=message):
            data_tool.main(["convert", str(LEROBOT / "v21_video"), *words], lambda *_: None)


def test_an_interrupted_conversion_goes_on_and_gives_the_same(tmp_path, monkeypatch):
    source = FakeData(num_episodes=3, episode_length=6, image_height=16, image_width=16).open()
    convert(source, tmp_path / "whole", "lerobot", control_hz=5, pictures="png")
    real, calls = type(source).frames, itertools.count()

    def torn(self, steps, camera):
        if next(calls) == 3:
            raise KeyboardInterrupt
        return real(self, steps, camera)

    with monkeypatch.context() as patch:
        patch.setattr(type(source), "frames", torn)
        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / "again", "lerobot", control_hz=5, pictures="png")
    assert (tmp_path / "again.unfinished" / "episodes" / "000000").is_dir()
    convert(source, tmp_path / "again", "lerobot", control_hz=5, pictures="png")
    assert opened(tmp_path / "again").fingerprint == opened(tmp_path / "whole").fingerprint
