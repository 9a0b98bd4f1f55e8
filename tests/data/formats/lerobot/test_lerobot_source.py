"""The LeRobot source against what the lerobot package itself read from the same files (`fixtures/README.md`)."""

import dataclasses
import json
import logging
import pickle
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from openpi_train.data.core.source import BadRecord
from openpi_train.data.formats.detection import source_at
from openpi_train.data.formats.lerobot import LeRobot
from openpi_train.data.formats.lerobot.lerobot_layout import read_layout
from openpi_train.data.formats.repack import StepArray, repack
from openpi_train.data.formats.rlds import Rlds
from openpi_train.data.robot.windows import Windows, WindowShape
from openpi_train.robots.bridge import Bridge
from openpi_train.runtime.exits import DataError
from openpi_train.tools import check_data
from openpi_train.tools import data as data_tool

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = ("v21_video", "v21_image", "v30_video", "v30_image", "v30_h264")
FRONT, WRIST = "observation/images/front", "observation/images/wrist"
CAMERAS = {"base_0_rgb": FRONT, "left_wrist_0_rgb": WRIST}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    cache = str(tmp_path_factory.mktemp("cache"))
    return {name: LeRobot(path=str(FIXTURES / name), cache_dir=cache).open() for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_frames_columns_and_tasks_are_bit_for_bit_what_lerobot_reads(sources, name):
    source, expected = sources[name], np.load(FIXTURES / f"{name}.npz")
    steps = expected["steps"]
    assert source.episode_ends.tolist() == [20, 37, 60]
    assert LeRobot(path=str(FIXTURES / name)).num_steps_in_metadata() == 60
    assert source.cameras == (FRONT, WRIST)
    for camera in source.cameras:
        np.testing.assert_array_equal(source.frames(steps, camera), expected[camera.replace("/", ".")], strict=True)
    assert set(source.columns) == {"observation/state", "action", "next/reward", "next/done"}
    for column, values in source.columns.items():
        assert isinstance(values, np.memmap) and len(values) == 60
        np.testing.assert_array_equal(values[steps], expected[column.replace("/", ".")], strict=True)
    assert [source.prompts[index] for index in source.prompt_index[steps]] == expected["task"].tolist()


@pytest.mark.parametrize("name", ["v30_video", "v30_h264"])
def test_steps_in_any_order_and_number_give_the_frames_that_they_give_alone(sources, name):
    source, steps = sources[name], np.random.default_rng(0).integers(0, 60, 40)
    together = source.frames(steps, WRIST)
    assert len({frame.tobytes() for frame in together}) == len(set(steps))
    for step, frame in zip(steps, together, strict=True):
        np.testing.assert_array_equal(source.frames(np.array([step]), WRIST)[0], frame)


def test_a_window_holds_the_frames_actions_and_task_of_its_steps(sources):
    source = sources["v30_video"]
    windows = Windows(source=source, robot=Bridge(cameras=CAMERAS), shape=WindowShape(horizon=4, history=3))
    row = windows.row(int(np.flatnonzero(windows.starts == 48)[0]))
    np.testing.assert_array_equal(row["image/left_wrist_0_rgb"], source.frames(np.arange(46, 49), WRIST))
    np.testing.assert_array_equal(row["actions"], source.columns["action"][48:52])
    assert row["prompt"] == "pull the lever"
    assert windows.prompt_at(46) == "push the block"  # the task changes at the episode's tenth step


def test_both_versions_of_the_same_episodes_have_the_same_ids_and_fingerprint(sources):
    old, new = sources["v21_image"], sources["v30_image"]
    assert list(old.episode_ids) == list(new.episode_ids)
    assert old.fingerprint == new.fingerprint
    assert len({*old.episode_ids, *sources["v30_video"].episode_ids, *sources["v30_h264"].episode_ids}) == 9


def test_a_pickled_source_is_small_and_reads_the_same(sources):
    source = sources["v30_video"]
    data = pickle.dumps(source)
    assert len(data) < 1000
    copy = pickle.loads(data)
    np.testing.assert_array_equal(copy.frames(np.array([3, 50]), FRONT), source.frames(np.array([3, 50]), FRONT))
    assert (
        copy.describe(40)
        == f"{FIXTURES / 'v30_video/data/chunk-000/file-000.parquet'}, record 2, episode 2, step 3 of 23"
    )


def test_a_wrong_camera_or_step_is_named_and_no_steps_give_no_frames(sources):
    source = sources["v30_video"]
    with pytest.raises(KeyError, match=r"no camera 'front' in .*; it has \['observation/images/front'"):
        source.frames(np.array([0]), "front")
    with pytest.raises(IndexError, match=r"step 60 is not in 0\.\.59"):
        source.frames(np.array([60]), FRONT)
    assert source.frames(np.array([], np.int64), FRONT).shape == (0, 48, 64, 3)


def test_pictures_can_be_repacked_and_videos_say_that_they_cannot(sources, tmp_path):
    source = sources["v30_image"]
    again = StepArray(path=str(repack(source, tmp_path / "steps"))).open()
    np.testing.assert_array_equal(again.frames(np.arange(60), WRIST), source.frames(np.arange(60), WRIST))
    assert again.fingerprint == source.fingerprint
    with pytest.raises(ValueError, match="is a video, whose frames are not stored as single pictures"):
        repack(sources["v30_video"], tmp_path / "other")


def test_the_format_is_detected_from_the_metadata(tmp_path, bridge_sample):
    assert isinstance(source_at(str(FIXTURES / "v21_video")), LeRobot)
    assert isinstance(source_at(str(bridge_sample)), Rlds)
    with pytest.raises(FileNotFoundError, match=r"holds no LeRobot dataset .*and .* holds no RLDS dataset"):
        source_at(str(tmp_path))


def test_a_name_that_is_no_path_is_looked_for_where_lerobot_downloads_to(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=f"nor is {tmp_path}/home/me/demos, .*.--data.repo-id"):
        source_at("me/demos")
    shutil.copytree(FIXTURES / "v30_video", tmp_path / "home" / "me" / "demos")
    with caplog.at_level("INFO"):
        assert source_at("me/demos") == LeRobot(path=str(tmp_path / "home" / "me" / "demos"))
    assert f"me/demos is read from LeRobot's folder: {tmp_path}/home/me/demos" in caplog.text
    checked = check_data.check_path("me/demos", split=None, columns={}, held_out=None, num_frames=8)
    assert checked[0].failure is None
    shutil.copytree(FIXTURES / "v30_video", tmp_path / "me" / "demos")
    assert source_at("me/demos") == LeRobot(path="me/demos")


def test_the_data_verb_indexes_it_and_refuses_a_split_which_it_has_not(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENPI_TRAIN_HOME", str(tmp_path))
    given = data_tool.Index(path=str(FIXTURES / "v21_video"))
    assert given.open().num_episodes == 3
    with pytest.raises(ValueError, match="is a LeRobot dataset, which has no splits: leave out --split val"):
        dataclasses.replace(given, split="val").open()


def test_a_fresh_index_is_used_again_and_a_changed_file_is_read_again(broken, caplog):
    copy = broken("v30_video")
    config = LeRobot(path=str(copy.root), cache_dir=str(copy.root.parent / "cache"))
    assert not config.is_ready()
    with caplog.at_level(logging.INFO):
        first = copy.open()
        assert config.is_ready()
        copy.open()
        assert caplog.text.count("index done") == 1
        (copy.root / "data/chunk-000/file-000.parquet").touch()
        with pytest.raises(DataError, match=r"file changed since its index was built"):
            (copy.root / "videos" / FRONT.replace("/", ".") / "chunk-000/file-000.mp4").touch()
            first.frames(np.array([0]), FRONT)
        assert not config.is_ready()
        assert copy.open().fingerprint == first.fingerprint
    assert caplog.text.count("index done") == 2


def test_pictures_in_the_index_that_were_lost_or_copied_are_made_again(broken):
    copy = broken("v30_image")
    source = copy.open()
    frames, paths = source.frames(np.arange(5), WRIST), list(source.stored.root.rglob("pictures/*.bin"))
    assert paths
    for harm in (paths[0].touch, paths[0].unlink):
        harm()
        np.testing.assert_array_equal(copy.open().frames(np.arange(5), WRIST), frames)


def test_version_2_0_is_read_and_others_are_refused_with_what_to_do(broken):
    copy = broken("v21_video")
    (copy.root / "meta/episodes_stats.jsonl").unlink()
    copy.edit_info(codebase_version="v2.0")
    assert copy.open().num_steps == 60
    copy.edit_info(codebase_version="v1.6")
    with pytest.raises(ValueError, match=r"codebase_version .*'v1\.6'.*v2\.0, v2\.1, v3\.0: convert"):
        copy.open()


def test_features_are_sorted_into_cameras_columns_and_what_is_left_out(broken):
    copy = broken("v21_image")
    features = json.loads((copy.root / "meta/info.json").read_text())["features"]
    features["observation.images.front"] |= {"shape": [3, 48, 64], "names": ["channels", "height", "width"]}
    features["observation.images.depth"] = features["observation.images.wrist"] | {"info": {"video.is_depth_map": True}}
    features["embedding"] = {"dtype": "float32", "shape": [257], "names": None}
    features["note"] = {"dtype": "string", "shape": [1], "names": None}
    copy.edit_info(features=features)
    layout = read_layout(copy.root)
    assert {name: camera.size for name, camera in layout.cameras.items()} == {
        "observation.images.front": (48, 64),
        "observation.images.wrist": (48, 64),
    }
    assert layout.columns["observation.state"] == ("float32", (7,)) and layout.columns["next.done"] == ("bool", ())
    assert layout.skipped == {
        "observation.images.depth": "a depth map",
        "embedding": "257 numbers wide",
        "note": "of type string",
    }


def test_missing_metadata_entries_files_and_features_are_named(broken, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no LeRobot dataset \(no meta/info\.json\)"):
        LeRobot(path=str(tmp_path)).open()
    copy = broken("v21_video")
    features = json.loads((copy.root / "meta/info.json").read_text())["features"]
    copy.edit_info(features={**features, "observation.mask": {"dtype": "video", "shape": [9, 9, 3], "names": None}})
    with pytest.raises(
        FileNotFoundError, match=r"3 of the \d+ files .* are missing: videos/chunk-000/observation\.mask"
    ):
        copy.open()
    copy.edit_info(features=features, data_path="{nothing}")
    with pytest.raises(ValueError, match=r"cannot read the metadata of .* 'nothing' is missing"):
        copy.open()


@pytest.mark.parametrize("name", ["v21_video", "v30_video"])
def test_a_truncated_video_costs_only_the_episodes_that_lack_frames(sources, broken, caplog, name):
    copy, whole = broken(name), sources[name]
    videos = sorted((copy.root / "videos").rglob("*.mp4"))
    short = next(path for path in videos if "wrist" in str(path))
    with short.open("r+b") as file:
        file.truncate(short.stat().st_size * 9 // 10)
    lost = {"v21_video": 0, "v30_video": 1}[name]
    with pytest.raises(BadRecord, match=rf"1 episodes of .* cannot be read:\n.*episode {lost}: .*{short.name}") as told:
        copy.open()
    assert "Fetch" not in str(told.value), "the user may have recorded it"
    with caplog.at_level(logging.WARNING):
        source = copy.open(on_bad_record="skip")
    assert f"episode {lost}: " in caplog.text
    assert source.num_dropped == 1
    assert list(source.episode_ids) == [name for number, name in enumerate(whole.episode_ids) if number != lost]
    kept = np.concatenate([np.arange(20, 60)] if lost == 0 else [np.arange(20), np.arange(37, 60)])
    np.testing.assert_array_equal(source.frames(np.arange(source.num_steps), WRIST), whole.frames(kept, WRIST))


def test_a_damaged_parquet_file_and_episodes_that_disagree_with_the_metadata_are_bad_records(broken):
    copy = broken("v21_image")
    torn = copy.root / "data/chunk-000/episode_000001.parquet"
    torn.write_bytes(torn.read_bytes()[:-100])
    lines = (copy.root / "meta/episodes.jsonl").read_text().replace('"length": 23', '"length": 24')
    (copy.root / "meta/episodes.jsonl").write_text(lines)
    with pytest.raises(BadRecord) as caught:
        copy.open()
    assert "2 episodes of" in str(caught.value)
    assert "episode_000001.parquet, episode 1: the file cannot be read" in str(caught.value)
    assert "episode 2: the file has 23 of its steps; the metadata say 24" in str(caught.value)
    assert copy.open(on_bad_record="skip").num_episodes == 1


def test_a_step_without_a_frame_at_its_time_is_named_with_file_and_time(broken):
    import pyarrow as pa
    import pyarrow.parquet as pq

    copy = broken("v21_video")
    file = copy.root / "data/chunk-000/episode_000000.parquet"
    table = pq.read_table(file)
    times = table["timestamp"].to_numpy().copy()
    times[3] += 2e-4
    column = table.schema.get_field_index("timestamp")
    pq.write_table(table.set_column(column, "timestamp", pa.array(times)), file)
    where = r"episode_000000\.mp4 has no frame within 0\.0001 s of 0\.3002 s, step 3; it has 20 frames"
    with pytest.raises(BadRecord, match=where):
        copy.open()
    assert copy.open(tolerance_s=3e-4).num_episodes == 3


def test_a_video_that_does_not_decode_is_a_bad_record_only_when_touched(broken):
    copy = broken("v30_video")
    whole = copy.open()
    file = copy.root / "videos" / FRONT.replace("/", ".") / "chunk-000/file-001.mp4"
    first, own = whole._spans[FRONT][39]
    offset, size, _ = whole.stored.arrays["packets"][own]
    content = bytearray(file.read_bytes())
    content[offset + 12 : offset + size] = bytes(255 for _ in range(size - 12))
    file.write_bytes(content)
    source = copy.open()
    assert first == own and source.fingerprint != whole.fingerprint
    source.frames(np.array([36, 37, 38, 41]), FRONT)
    with pytest.raises(BadRecord, match=r"episode 2, step 2 of 23, observation/images/front, .*file-001\.mp4: cannot"):
        source.frames(np.array([39]), FRONT)


def test_a_missing_extra_is_named(broken, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ValueError, match=r"need av: pip install 'openpi_train\[lerobot\]'"):
        broken("v21_video").open()
