"""What our writer makes of lerobot's own episodes, against what lerobot made of them (`fixtures/README.md`)."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from openpi_train.data.formats.detection import source_at
from openpi_train.data.formats.lerobot import LeRobot, LeRobotWriter, assemble
from openpi_train.data.formats.lerobot.features import NUMBERING

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = ("v21_video", "v21_image", "v30_video", "v30_image", "v30_h264")
# Where the genuine pictures are kept as they were.
LOSSLESS = FIXTURES / "v30_image"
CAMERAS = ("observation.images.front", "observation.images.wrist")


def info_of(path: Path) -> dict:
    return json.loads((path / "meta/info.json").read_text())


def own_features(info: dict) -> dict:
    return {name: feature for name, feature in info["features"].items() if name not in NUMBERING}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return LeRobot(path=str(LOSSLESS), cache_dir=str(tmp_path_factory.mktemp("cache"))).open()


def episode(source, number: int) -> tuple[dict, dict, list[str]]:
    """Columns, pictures (as stored) and tasks of one of the genuine episodes."""
    first = int(source.episode_ends[number - 1]) if number else 0
    steps = range(first, int(source.episode_ends[number]))
    columns = {name.replace("/", "."): values[steps.start : steps.stop] for name, values in source.columns.items()}
    frames = {camera: [source.encoded(step, camera.replace(".", "/")) for step in steps] for camera in CAMERAS}
    return columns, frames, [source.prompts[source.prompt_index[step]] for step in steps]


def writer_like(name: str, path: Path) -> LeRobotWriter:
    info = info_of(FIXTURES / name)
    features = {key: {k: v for k, v in f.items() if k != "info"} for key, f in own_features(info).items()}
    return LeRobotWriter(
        path,
        fps=info["fps"],
        features=features,
        robot_type=info["robot_type"],
        version=info["codebase_version"],
        codec="h264" if "h264" in name else "av1",
    )


@pytest.fixture(scope="module")
def written(original, tmp_path_factory):
    """The genuine episodes, written by us in each of the fixtures' forms."""
    folder = tmp_path_factory.mktemp("written")
    for name in NAMES:
        writer = writer_like(name, folder / name)
        for number in range(3):
            columns, frames, tasks = episode(original, number)
            writer.add_episode(columns, frames, task=tasks)
        assert writer.finish() == folder / name
    return folder


def tree(path: Path) -> set[str]:
    """Its files, those of 3.0 without their numbers: the fixtures were cut at a few kB."""
    files = (str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
    return {file.split("/file-")[0] for file in files}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_files_keys_columns_and_types_are_lerobots(written, name):
    ours, theirs = written / name, FIXTURES / name
    assert tree(ours) == tree(theirs)
    info, genuine = info_of(ours), info_of(theirs)
    assert list(info) == list(genuine)
    for key in ("data_files_size_in_mb", "video_files_size_in_mb"):  # made small for the fixture
        if key in genuine:
            genuine[key] = info[key]
    assert info == genuine
    assert list(info["features"]) == list(genuine["features"])
    for pattern in ("data/*/*.parquet", "meta/*.parquet", "meta/episodes/*/*.parquet"):
        mine, other = ([pq.read_schema(path) for path in sorted(root.glob(pattern))] for root in (ours, theirs))
        assert bool(mine) == bool(other)
        for schema in mine:
            if "data/" in pattern:
                described = [json.loads(s.metadata[b"huggingface"])["info"] for s in (schema, other[0])]
                assert described[0] == described[1]
            if "pandas" in str(other[0].metadata):
                described = [json.loads(s.metadata[b"pandas"]) for s in (schema, other[0])]
                assert described[0] | {"pandas_version": "", "creator": {}} == described[1] | {
                    "pandas_version": "",
                    "creator": {},
                }
            assert schema.equals(other[0])


@pytest.mark.parametrize("name", NAMES)
def test_rows_tasks_and_places_are_lerobots(written, name):
    ours, theirs = written / name, FIXTURES / name
    mine, other = (
        [row for path in sorted(root.glob("data/*/*.parquet")) for row in pq.read_table(path).to_pylist()]
        for root in (ours, theirs)
    )
    for a, b in zip(mine, other, strict=True):
        # The tasks of lerobot's episodes come in a random order, and number themselves so.
        assert {k: v for k, v in a.items() if k not in (*CAMERAS, "task_index")} == {
            k: v for k, v in b.items() if k not in (*CAMERAS, "task_index")
        }
        for camera in set(CAMERAS) & set(a):
            assert a[camera]["bytes"] == b[camera]["bytes"]
    if name.startswith("v30"):
        rows = [pq.read_table(next(root.glob("meta/episodes/*/*.parquet"))).to_pylist() for root in (ours, theirs)]
        for a, b in zip(*rows, strict=True):
            assert sorted(a.pop("tasks")) == sorted(b.pop("tasks"))
            same = {k for k in a if not k.startswith("stats/") and "file_index" not in k and "timestamp" not in k}
            assert {k: a[k] for k in same} == {k: b[k] for k in same}


def flat(stats: dict) -> dict[str, np.ndarray]:
    return {f"{name}/{key}": np.array(value) for name, entry in stats.items() for key, value in entry.items()}


def check_stats(ours: dict, theirs: dict, *, of_pictures: bool) -> int:
    """Every statistic is lerobot's; returns how many were compared."""
    ours, theirs = flat(ours), flat(theirs)
    assert set(ours) == set(theirs)
    compared = 0
    for name, value in theirs.items():
        feature, key = name.rsplit("/", 1)
        if feature == "task_index" or (key == "std" and feature in CAMERAS and not of_pictures):
            continue
        # lerobot takes float32's sums and histograms; a value at a bin's edge may count in the next bin.
        width = ours[f"{feature}/max"].astype(float) - ours[f"{feature}/min"].astype(float)
        bound = width / 5000 + 1e-6 if key.startswith("q") else 1e-5 * np.maximum(1, abs(value))
        assert ours[name].shape == value.shape
        assert (abs(ours[name].astype(float) - value.astype(float)) <= bound).all(), (name, ours[name], value)
        compared += 1
    return compared


@pytest.mark.parametrize("name", ["v21_video", "v30_image"])
def test_statistics_are_lerobots(written, name):
    if name.startswith("v21"):
        mine, other = (
            [json.loads(line)["stats"] for line in (root / "meta/episodes_stats.jsonl").read_text().splitlines()]
            for root in (written / name, FIXTURES / name)
        )
        for a, b in zip(mine, other, strict=True):
            assert check_stats(a, b, of_pictures=True) == 10 * 5
        return
    # lerobot 0.4.4 squares pictures in 8 bits: the standard deviations of pictures are right in its format 2.1 alone.
    mine, other = (json.loads((root / "meta/stats.json").read_text()) for root in (written / name, FIXTURES / name))
    assert check_stats(mine, other, of_pictures=False) == 10 * 10 - 2


@pytest.mark.parametrize("name", NAMES)
def test_our_reader_reads_back_what_was_written(written, original, tmp_path, name):
    assert isinstance(source_at(str(written / name)), LeRobot)
    source = LeRobot(path=str(written / name), cache_dir=str(tmp_path)).open()
    assert source.episode_ends.tolist() == original.episode_ends.tolist()
    for column, values in original.columns.items():
        np.testing.assert_array_equal(source.columns[column], values, strict=True)
    steps = np.arange(60)
    assert [source.prompts[i] for i in source.prompt_index] == [original.prompts[i] for i in original.prompt_index]
    for camera in source.cameras:
        expected = original.frames(steps, camera).astype(int)
        error = np.abs(source.frames(steps, camera).astype(int) - expected)
        if "image" in name:
            assert not error.any()
            continue
        # As near as lerobot's own encoding of the same pictures, which its reading of the fixture shows.
        genuine = np.load(FIXTURES / f"{name}.npz")
        theirs = np.abs(genuine[camera.replace("/", ".")].astype(int) - expected[genuine["steps"]])
        assert error[genuine["steps"]].mean() < 1.2 * theirs.mean() + 0.1
    if name == "v30_image":
        assert source.fingerprint == original.fingerprint


def test_episodes_in_files_of_their_own_read_as_those_that_share_one(written, original, tmp_path, monkeypatch):
    monkeypatch.setattr(assemble, "_VIDEO_MB", 0)
    monkeypatch.setattr(assemble, "_DATA_MB", 0)
    writer = writer_like("v30_h264", tmp_path / "apart")
    for number in range(3):
        columns, frames, tasks = episode(original, number)
        writer.add_episode(columns, frames, task=tasks)
    writer.finish()
    apart, joined = (
        LeRobot(path=str(path), cache_dir=str(tmp_path)).open() for path in (writer.path, written / "v30_h264")
    )
    for folder, number in ((writer.path, 3), (written / "v30_h264", 1)):
        assert len(list((folder / "data").rglob("*.parquet"))) == number
        assert len(list(folder.glob(f"videos/{CAMERAS[0]}/**/*.mp4"))) == number
    assert apart.episode_ends.tolist() == joined.episode_ends.tolist()
    for column, values in joined.columns.items():
        np.testing.assert_array_equal(apart.columns[column], values, strict=True)
    # x264 does not make the same bytes of the same pictures each time: a frame is that of its step where of all the
    # original pictures this step's is the nearest.
    for camera in apart.cameras:
        frames, pictures = (source.frames(np.arange(60), camera).astype(int) for source in (apart, original))
        errors = [[np.abs(frame - picture).mean() for picture in pictures] for frame in frames]
        assert np.argmin(errors, axis=1).tolist() == list(range(60))


TOY = {
    "action": {"dtype": "float32", "shape": (2,), "names": ["x_m", "gripper_fraction"]},
    "next.success": {"dtype": "bool", "shape": (1,), "names": None},
    "keypoints": {"dtype": "float32", "shape": (3, 2), "names": None},
    "observation.images.top": {"dtype": "image", "shape": (8, 10, 3)},
}
# Writes three episodes, and kills itself with nothing cleaned up where it is told to.
RECORDER = """
import os, signal, sys
import numpy as np
from openpi_train.data.formats.lerobot import LeRobotWriter
from openpi_train.data.formats.lerobot import assemble
sys.path.insert(0, sys.argv[1])
from test_lerobot_writer import TOY, toy_episode

path, where = sys.argv[2:]
writer = LeRobotWriter(path, fps=5, features=TOY)
def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)
def pictures(frames, number):
    for step, frame in enumerate(frames):
        if where == f"episode {number}" and step == 2:
            killed()
        yield frame
if where == "finish":
    assemble._write_tasks = killed
for number in range(writer.num_episodes, 3):
    columns, frames = toy_episode(number)
    writer.add_episode(columns, {n: pictures(f, number) for n, f in frames.items()}, task=f"task {number % 2}")
writer.finish()
"""


def toy_episode(number: int, length: int = 4) -> tuple[dict, dict]:
    random = np.random.default_rng(number)
    columns = {
        "action": random.normal(size=(length, 2)).astype(np.float32),
        "next.success": np.arange(length) == length - 1,
        "keypoints": random.normal(size=(length, 3, 2)).astype(np.float32),
    }
    return columns, {"observation.images.top": random.integers(0, 256, (length, 8, 10, 3), np.uint8)}


def record(path: Path, where: str) -> int:
    here = str(Path(__file__).parent)
    return subprocess.run([sys.executable, "-c", RECORDER, here, str(path), where], timeout=60).returncode


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.slow
def test_a_killed_recording_leaves_nothing_that_looks_whole_and_goes_on(tmp_path):
    path = tmp_path / "arm"
    for where in ("episode 2", "finish"):
        assert record(path, where) == -9
        assert not path.exists()
        with pytest.raises(FileNotFoundError):
            source_at(str(tmp_path / "arm.unfinished"))
    assert LeRobotWriter(path, fps=5, features=TOY).num_episodes == 3  # the third was written by the second recorder
    assert record(path, "nowhere") == 0 and record(tmp_path / "whole", "nowhere") == 0
    assert contents(path) == contents(tmp_path / "whole")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["arm", "whole"]
    source = LeRobot(path=str(path), cache_dir=str(tmp_path / "cache")).open()
    columns, frames = toy_episode(1)
    np.testing.assert_array_equal(source.columns["keypoints"][4:8], columns["keypoints"])
    np.testing.assert_array_equal(source.columns["next/success"][4:8], columns["next.success"])
    np.testing.assert_array_equal(
        source.frames(np.arange(4, 8), "observation/images/top"), frames["observation.images.top"]
    )
    assert [source.prompts[index] for index in source.prompt_index[::4]] == ["task 0", "task 1", "task 0"]


def test_what_does_not_fit_is_named_and_nothing_of_it_is_kept(tmp_path):
    writer = LeRobotWriter(tmp_path / "arm", fps=5, features=TOY)
    columns, frames = toy_episode(0)
    short = {name: list(pictures)[:3] for name, pictures in frames.items()}
    small = {name: pictures[:, :6] for name, pictures in frames.items()}
    bad = np.where(np.arange(8).reshape(4, 2) == 5, np.nan, 0)
    cases = [
        (columns, short, "a", "has 3 pictures for 4 steps"),
        (columns, small, "a", r"picture 0 of 'observation.images.top' is uint8 \[6, 10, 3\]; .* uint8 \[8, 10, 3\]"),
        (columns, frames, ["a", "b"], "has 4 steps, but 2 tasks"),
        (columns, {}, "a", r"cameras of episode 0: missing \['observation.images.top'\]"),
        ({**columns, "force": bad}, frames, "a", r"missing \[\], unknown \['force'\]"),
        ({**columns, "action": bad}, frames, "a", r"column 'action' holds \[ ?0. nan\] at step 2"),
        (
            {**columns, "action": bad[:, :1]},
            frames,
            "a",
            r"column 'action' is float64 \[1\] per step; .* float32 \[2\]",
        ),
        ({**columns, "action": columns["action"][:3]}, frames, "a", "the same length, at least 1"),
    ]
    for given, pictures, task, message in cases:
        with pytest.raises(ValueError, match=message):
            writer.add_episode(given, pictures, task=task)
    with pytest.raises(ValueError, match="has no episodes yet"):
        writer.finish()
    assert sorted(entry.name for entry in (tmp_path / "arm.unfinished").iterdir()) == ["episodes", "plan.json"]
    assert not list((tmp_path / "arm.unfinished" / "episodes").iterdir())


def test_settings_that_cannot_be_or_are_others_are_refused(tmp_path):
    LeRobotWriter(tmp_path / "arm", fps=5, features=TOY)
    with pytest.raises(ValueError, match=r"was begun with other fps, version: give the same again"):
        LeRobotWriter(tmp_path / "arm", fps=6, features=TOY, version="v2.1")
    with pytest.raises(ValueError, match=r"fps 16\.67 is not a whole number"):
        LeRobotWriter(tmp_path / "other", fps=16.67, features=TOY)
    (tmp_path / "there").mkdir()
    with pytest.raises(FileExistsError, match="exists already"):
        LeRobotWriter(tmp_path / "there", fps=5, features=TOY)
    for change, message in (
        ({"a/b": TOY["action"]}, "no slashes"),
        ({"index": TOY["action"]}, "cannot be named 'index'"),
        ({"action": {"dtype": "float16", "shape": (2,)}}, "has dtype 'float16'; allowed are bool, float32"),
        ({"action": {"dtype": "float32", "shape": (2,), "names": ["x"]}}, "one name per number"),
        ({"action": {"dtype": "float32"}}, "it must have dtype, shape, names"),
        ({"observation.images.top": {"dtype": "video", "shape": (8, 8)}}, "height, width, 3"),
    ):
        with pytest.raises(ValueError, match=message):
            LeRobotWriter(tmp_path / "other", fps=5, features={**TOY, **change})
    odd = TOY | {"observation.images.top": {"dtype": "video", "shape": (63, 64, 3)}}
    columns, _ = toy_episode(0)
    writer = LeRobotWriter(tmp_path / "odd", fps=5, features=odd)
    with pytest.raises(ValueError, match="63x64 cannot be a video: both sides must be even"):
        writer.add_episode(columns, {"observation.images.top": np.zeros((4, 63, 64, 3), np.uint8)}, task="a")


def test_a_version_that_is_not_written_is_refused_with_those_that_are(tmp_path):
    with pytest.raises(ValueError, match=r"version '2\.1' is not written; it may be v2\.1 or v3\.0"):
        LeRobotWriter(tmp_path / "new", fps=10, features={}, version="2.1")
