"""The zarr source against stores that the zarr package wrote (`stores.py`)."""

import dataclasses
import logging
import pickle
import re
import warnings

import numpy as np
import pytest
import zarr
from stores import HEIGHT, LENGTHS, WIDTH, arms, push_t, write

from openpi_train import registry
from openpi_train.data.core.source import BadRecord
from openpi_train.data.core.workers import LocalBatches
from openpi_train.data.formats.detection import source_at
from openpi_train.data.formats.zarr import Zarr
from openpi_train.data.formats.zarr.zarr_source import ZarrSource
from openpi_train.data.robot.config import Dataset
from openpi_train.data.robot.norm_stats import compute_norm_stats
from openpi_train.data.robot.rows import Rows
from openpi_train.data.robot.windows import Windows, WindowShape
from openpi_train.robots.pusht import PushT
from openpi_train.robots.robotwin import RoboTwin
from openpi_train.tools import check_run
from openpi_train.tools import data as data_tool

ROWS = sum(LENGTHS)
FORMS = {
    "v2.zarr": {},
    "v2.zarr.zip": {},
    "v3.zarr": {"form": 3},
    "v3_shards.zarr": {"form": 3, "chunk_rows": 2, "shards": True},
    "one_chunk.zarr": {"chunk_rows": 100},
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    return {name: write(folder / name, arms(), **options) for name, options in FORMS.items()}


def test_frames_and_columns_are_those_written_whatever_the_form(stores, cache):
    expected, sources = (
        arms(),
        [Zarr(path=str(path), cache_dir=cache, decoded_copy=False).open() for path in stores.values()],
    )
    steps = np.random.default_rng(1).integers(0, ROWS, 40)
    for source in sources:
        assert source.episode_ends.tolist() == np.cumsum(LENGTHS).tolist()
        assert source.cameras == ("head_camera",) and list(source.prompts) == [""]
        pictures = expected["head_camera"].transpose(0, 2, 3, 1)
        np.testing.assert_array_equal(source.frames(steps, "head_camera"), pictures[steps], strict=True)
        assert set(source.columns) == {"state", "action"}
        for name, values in source.columns.items():
            assert isinstance(values, np.memmap)
            np.testing.assert_array_equal(values, expected[name], strict=True)
    assert len({source.fingerprint for source in sources}) == 1  # neither form nor chunks are content
    assert len({tuple(source.episode_ids) for source in sources}) == 1
    assert len(set(sources[0].episode_ids)) == len(LENGTHS)


def test_push_t_opens_with_pictures_of_floats_and_its_other_columns(tmp_path, cache):
    expected, path = push_t(), write(tmp_path / "push_t.zarr", push_t(), chunk_rows=6)
    source = Zarr(path=str(path), cache_dir=cache).open()
    assert source.cameras == ("img",)
    frames = source.frames(np.arange(ROWS), "img")
    assert frames.dtype == np.uint8 and np.array_equal(frames, expected["img"])
    assert {name: column.shape[1:] for name, column in source.columns.items()} == {
        "action": (2,), "keypoint": (9, 2), "n_contacts": (1,), "state": (5,),
    }  # fmt: skip
    windows = Windows(source=source, robot=PushT(keypoints=True), shape=WindowShape(horizon=4, history=2))
    row = windows.row(11)
    points = np.concatenate([expected["keypoint"][10:12].reshape(2, 18), expected["state"][10:12, :2]], axis=1)
    np.testing.assert_array_equal(row["state"], points)
    np.testing.assert_array_equal(row["image/image"], frames[10:12])
    with pytest.raises(ValueError, match=r"the RoboTwin robot has 14 state dims .*; the dataset gives 5: state 5"):
        _ = Windows(source=source, robot=RoboTwin(cameras={}), shape=WindowShape(horizon=4)).starts


def test_a_decoded_copy_gives_the_same_frames_and_is_made_where_there_is_room(stores, tmp_path, caplog, monkeypatch):
    def opened(cache, **options):
        source = Zarr(path=str(stores["v2.zarr"]), cache_dir=str(tmp_path / cache), **options).open()
        return source, (tmp_path / cache).rglob("frames/head_camera.bin")

    steps = np.array([5, 0, 26, 5])
    plain, copies = opened("no", decoded_copy=False)
    assert not list(copies)
    with caplog.at_level(logging.INFO):
        copied, copies = opened("auto")
    assert re.search(r"v2\.zarr: .*chunk with 3 others", caplog.text)
    assert [path.stat().st_size for path in copies] == [ROWS * HEIGHT * WIDTH * 3]
    for source in (copied, pickle.loads(pickle.dumps(copied))):
        np.testing.assert_array_equal(source.frames(steps, "head_camera"), plain.frames(steps, "head_camera"))
        assert source.fingerprint == plain.fingerprint
    monkeypatch.setattr("openpi_train.data.formats.zarr.zarr_index._MOST_OF_FREE_DISK", 0)
    with caplog.at_level(logging.INFO):
        _, copies = opened("full")
    assert "reading one decompresses all" in caplog.text and not list(copies)
    copied, copies = opened("yes", decoded_copy=True)
    path = next(iter(copies))
    path.unlink()  # it is made again
    np.testing.assert_array_equal(
        opened("yes", decoded_copy=True)[0].frames(steps, "head_camera"), copied.frames(steps, "head_camera")
    )
    assert path.is_file()


@pytest.mark.parametrize("name", ["v2.zarr", "v2.zarr.zip", "v3_shards.zarr"])
def test_a_pickled_source_is_small_and_reads_the_same(stores, cache, name):
    source = Zarr(path=str(stores[name]), cache_dir=cache, decoded_copy=False).open()
    source.frames(np.array([0]), "head_camera")  # open handles stay behind
    data = pickle.dumps(source)
    assert len(data) < 1000
    copy = pickle.loads(data)
    np.testing.assert_array_equal(
        copy.frames(np.array([3, 20]), "head_camera"), arms()["head_camera"].transpose(0, 2, 3, 1)[[3, 20]]
    )
    assert copy.describe(20) == f"{stores[name]}, row 20, episode 2, step 6 of 13"


def test_a_wrong_camera_or_step_is_named_and_no_steps_give_no_frames(stores, cache):
    source = Zarr(path=str(stores["v2.zarr"]), cache_dir=cache).open()
    with pytest.raises(KeyError, match=r"no camera 'front' in .*; it has \['head_camera'\]"):
        source.frames(np.array([0]), "front")
    with pytest.raises(IndexError, match=r"step 27 is not in 0\.\.26"):
        source.frames(np.array([27]), "head_camera")
    assert source.frames(np.array([], np.int64), "head_camera").shape == (0, HEIGHT, WIDTH, 3)


def test_the_format_is_detected_and_shapes_cost_no_index(stores, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENPI_TRAIN_HOME", str(tmp_path / "home"))
    for path in stores.values():
        source = source_at(str(path))
        assert isinstance(source, Zarr)
        assert source.column_shapes() == {"state": (14,), "action": (14,)}
    assert not (tmp_path / "home").exists()
    with pytest.raises(FileNotFoundError, match="absent does not exist"):
        source_at(str(tmp_path / "absent"))
    given = data_tool.Index(path=str(stores["v3.zarr"]))
    assert given.open().num_episodes == 3
    assert source_at(given.path).num_steps_in_metadata() == given.open().num_steps
    with pytest.raises(ValueError, match="is a Zarr dataset, which has no splits: leave out --split val"):
        dataclasses.replace(given, split="val").open()


def test_a_fresh_index_is_used_again_and_a_changed_store_is_read_again(tmp_path, caplog):
    path = write(tmp_path / "a.zarr", arms())
    config = Zarr(path=str(path), cache_dir=str(tmp_path / "cache"))
    assert not config.is_ready()
    with caplog.at_level(logging.INFO):
        first = config.open()
        assert config.is_ready() and config.open().fingerprint == first.fingerprint
        assert caplog.text.count("index done") == 1
        zarr.open_group(str(path))["data/action"][3] = 0
        assert not config.is_ready()
        assert config.open().fingerprint != first.fingerprint
    assert caplog.text.count("index done") == 2


@pytest.mark.parametrize("name", ["a.zarr", "a.zarr.zip"])
def test_a_store_that_keeps_its_size_is_read_again_when_it_changed(tmp_path, name):
    def state():
        return sorted((path.name, path.stat().st_size) for path in (path, *path.rglob("*")) if path.is_file())

    path = write(tmp_path / name, arms())
    config, before = Zarr(path=str(path), cache_dir=str(tmp_path / "cache")), state()
    first, other = config.open(), arms()
    other["head_camera"][3, 0, 0, 0] ^= 1  # pictures of noise, which are not compressed
    write(path, other)
    assert state() == before and not config.is_ready()
    assert config.open().fingerprint != first.fingerprint


@pytest.mark.parametrize("decoded_copy", [True, False])
def test_steps_behind_an_episode_that_was_left_out_have_their_own_rows(tmp_path, decoded_copy):
    path = write(tmp_path / "a.zarr", arms(), chunk_rows=1)
    (path / "data/state/10.0").unlink()  # episode 1: rows 9..13
    source = Zarr(
        path=str(path), cache_dir=str(tmp_path / "cache"), on_bad_record="skip", decoded_copy=decoded_copy
    ).open()
    kept = np.r_[:9, 14:ROWS]
    assert source.episode_ends.tolist() == [9, 22]
    pictures = arms()["head_camera"].transpose(0, 2, 3, 1)[kept]
    np.testing.assert_array_equal(source.frames(np.arange(22), "head_camera"), pictures)
    np.testing.assert_array_equal(source.columns["action"], arms()["action"][kept])
    assert source.describe(9).endswith("row 14, episode 1, step 0 of 13")


def test_missing_and_torn_chunks_cost_the_episodes_that_lie_in_them(tmp_path):
    path = write(tmp_path / "a.zarr", arms())
    whole = Zarr(path=str(path), cache_dir=str(tmp_path / "cache")).open()
    (path / "data/head_camera/0.0.0.0").unlink()  # rows 0..3: episode 0
    torn = path / "data/action/6.0"  # rows 24..26: episode 2
    torn.write_bytes(torn.read_bytes()[:-20])
    with pytest.raises(BadRecord) as caught:
        Zarr(path=str(path), cache_dir=str(tmp_path / "cache")).open()
    said = str(caught.value)
    assert "2 episodes of" in said and "--data.on-bad-record skip" in said
    assert "episode 0: data/head_camera, rows 0..3: " in said and "is missing" in said
    assert "fill-missing" in said
    assert "episode 2: data/action, rows 24..26: " in said and "6.0" in said
    source = Zarr(path=str(path), cache_dir=str(tmp_path / "cache"), on_bad_record="skip").open()
    assert source.num_dropped == 2 and list(source.episode_ids) == [whole.episode_ids[1]]
    frames = source.frames(np.arange(5), "head_camera")
    np.testing.assert_array_equal(frames, whole.frames(np.arange(9, 14), "head_camera"))
    np.testing.assert_array_equal(source.columns["state"], whole.columns["state"][9:14])
    assert source.describe(0).endswith("row 9, episode 0, step 0 of 5")


def test_a_chunk_that_goes_bad_later_is_a_bad_record_only_when_touched(tmp_path):
    path = write(tmp_path / "a.zarr", arms())
    source = Zarr(path=str(path), cache_dir=str(tmp_path / "cache"), decoded_copy=False).open()
    (path / "data/head_camera/3.0.0.0").write_bytes(b"torn")
    source.frames(np.array([0, 11, 16]), "head_camera")
    with pytest.raises(BadRecord, match=r"a\.zarr, row 13, episode 1, step 4 of 5, head_camera: .*3\.0\.0\.0"):
        source.frames(np.array([13]), "head_camera")


def test_chunks_of_nothing_but_zeros_may_be_left_out_if_it_is_said(tmp_path):
    arrays = arms() | {"state": np.zeros((ROWS, 14), np.float32)}
    path = write(tmp_path / "a.zarr", arrays)
    (path / "data/state/0.0").unlink()
    source = Zarr(path=str(path), cache_dir=str(tmp_path / "cache"), fill_missing=True).open()
    assert not source.columns["state"].any()


def test_what_is_no_replay_buffer_or_does_not_fit_together_is_refused(tmp_path):
    def refused(path, pattern, error=ValueError):
        with pytest.raises(error, match=pattern):
            Zarr(path=str(path), cache_dir=str(tmp_path / "cache")).open()

    refused(
        tmp_path / "none.zarr", r"there is no .*none\.zarr .*: name another dataset by --dataset", FileNotFoundError
    )
    refused(tmp_path, "holds no zarr store; give a folder with .zgroup or zarr.json", FileNotFoundError)
    zarr.open_group(str(tmp_path / "empty.zarr"), mode="w", zarr_format=2)
    refused(tmp_path / "empty.zarr", "needs meta/episode_ends and arrays in data/, but has no arrays")
    short = write(tmp_path / "short.zarr", {name: values[:20] for name, values in arms().items()})
    refused(short, r"none of its arrays has a row for each of the 27 steps .*state: 20 rows.* not written completely")
    falling = write(tmp_path / "falling.zarr", arms(), lengths=(20, -5, 12))
    refused(falling, r"must be integers that increase .* int64 \[3\], beginning with \[20, 15, 27\]")
    between = push_t() | {"img": push_t()["img"] / 255}
    refused(write(tmp_path / "b.zarr", between), "img holds numbers from 0 to 1 that are not all pixels", BadRecord)


def test_pixels_that_are_whole_but_for_rounding_are_read(tmp_path):
    stored = push_t()["img"].astype(np.float32)
    noise = np.random.default_rng(0).uniform(-9e-4, 9e-4, stored.shape).astype(np.float32)
    arrays = push_t() | {"img": stored + noise}
    source = Zarr(path=str(write(tmp_path / "a.zarr", arrays)), cache_dir=str(tmp_path / "cache")).open()
    steps = np.arange(source.num_steps)
    np.testing.assert_array_equal(source.frames(steps, "img"), stored[steps].astype(np.uint8))
    beyond = push_t() | {"img": np.where(np.arange(len(stored))[:, None, None, None] == 3, 255.4, stored)}
    with pytest.raises(BadRecord, match=r"rows 0\.\.\d+: img holds numbers from .* to 255.4 that are not all pixels"):
        Zarr(path=str(write(tmp_path / "b.zarr", beyond)), cache_dir=str(tmp_path / "cache")).open()


def test_arrays_that_are_neither_camera_nor_column_are_left_out_with_the_reason(tmp_path, caplog):
    arrays = arms() | {"text_feat": np.zeros((ROWS, 512), np.float32), "goal": np.zeros((len(LENGTHS), 4), np.float32)}
    with caplog.at_level(logging.INFO):
        source = Zarr(path=str(write(tmp_path / "a.zarr", arrays)), cache_dir=str(tmp_path / "cache")).open()
    assert set(source.columns) == {"state", "action"}
    assert "data/text_feat is not in the index: 512 numbers wide" in caplog.text
    assert "data/goal is not in the index: one row per episode, not per step" in caplog.text


@pytest.mark.parametrize("form", [2, 3])
def test_arrays_that_no_robot_can_read_are_left_out_and_a_robot_that_wants_one_hears_why(tmp_path, form):
    arrays = arms() | {"short": np.zeros((20, 3), np.float32), "cube": np.zeros((ROWS, 3, 4, 3), np.uint8)}
    path = write(tmp_path / "a.zarr", arrays, form=form)
    root = zarr.open_group(str(path), mode="a")
    words = np.array(["pick", "place"] * ROWS)[:ROWS]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zarr: the type of these arrays has no specification yet
        root["data"].create_array("words", data=words)
        root["data"].create_array("letters", shape=(ROWS,), dtype=str)[:] = words
        root["meta"].create_array("names", shape=(3,), dtype=str)[:] = np.array(["a", "b", "c"])
    root["data"].create_array("rate", shape=(), dtype="float32")[...] = 10
    root["data"].create_group("more").create_array("x", data=np.zeros((ROWS, 2), np.float32))
    (path / "data" / "torn").mkdir()
    (path / "data" / "torn" / (".zarray" if form == 2 else "zarr.json")).write_text("{")
    (path / "data" / "._state").mkdir()
    source = Zarr(path=str(path), cache_dir=str(tmp_path / "cache")).open()
    assert set(source.columns) == {"state", "action"} and source.cameras == ("head_camera",)
    left_out = source.about().left_out
    assert set(left_out) == {"short", "cube", "words", "letters", "rate", "more", "torn"}
    assert left_out["short"] == "20 rows for 27 steps" and left_out["more"] == "a group, not an array"
    assert "ambiguous" in left_out["cube"] and "scalar" in left_out["rate"] and "is not JSON" in left_out["torn"]
    assert [finding.where for finding in source.findings] == ["data/short"]
    robot = RoboTwin(state_columns=("short",))
    with pytest.raises(ValueError, match=r"the dataset lacks short .*short is left out: 20 rows for 27 steps"):
        len(Windows(source=source, robot=robot, shape=WindowShape(horizon=2)))


def test_processes_read_their_rows_alone_and_stats_no_picture_at_all(stores, cache, tmp_path, monkeypatch):
    shape = WindowShape(horizon=4, history=2, first_action=-1, pad_after=1)
    windows = Windows(source=Zarr(path=str(stores["v2.zarr"]), cache_dir=cache).open(), robot=RoboTwin(), shape=shape)
    spec = {
        "image/head_camera": ((2, HEIGHT, WIDTH, 3), "uint8"),
        "state": ((2, 14), "float32"),
        "actions": ((4, 14), "float32"),
    }
    rows = Rows([windows], ["arms"], [1.0], [()], spec=spec, seed=3)
    whole, _ = rows.batch(np.arange(8))
    read = []
    frames = ZarrSource.frames
    monkeypatch.setattr(ZarrSource, "frames", lambda *given: read.append(given[1]) or frames(*given))
    halves = [LocalBatches(rows, 8, np.arange(first, first + 4))[0]["columns"] for first in (0, 4)]
    assert len(read) == 8  # one window per row, and no more
    for name, values in whole.items():
        np.testing.assert_array_equal(np.concatenate([half[name] for half in halves]), values)
    read.clear()
    stats, _ = compute_norm_stats([windows], [1.0], 10**6)
    assert not read
    steps = windows.steps
    np.testing.assert_array_equal(stats["actions"].low, steps.actions.min(axis=0))
    np.testing.assert_array_equal(stats["actions"].high, steps.actions.max(axis=0))


def test_the_doctor_looks_at_it(stores, tmp_path):
    dataset = Dataset(source=Zarr(path=str(stores["v2.zarr"]), cache_dir=str(tmp_path)), robot=RoboTwin())
    debug = registry.load("debug")
    experiment = dataclasses.replace(debug, data=dataclasses.replace(debug.data, datasets=(dataset,)))
    found = [finding.text for finding in check_run.data(experiment)]
    assert any("v2.zarr: there, but not indexed yet, or changed since" in text for text in found)
    dataset.source.open()
    found = [finding.text for finding in check_run.data(experiment)]
    assert "v2.zarr: 3 episodes, " in " ".join(found)
