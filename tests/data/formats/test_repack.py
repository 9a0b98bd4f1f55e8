"""The repacked form against its source: equal bytes, resumption, damage."""

import errno
import pickle

import numpy as np
import pytest
from rlds_toy import toy_source, write_toy

from openpi_train.data.core.source import BadRecord
from openpi_train.data.formats import repack as repack_module
from openpi_train.data.formats.repack import StepArray, repack
from openpi_train.data.formats.rlds import Rlds


@pytest.fixture
def source(tmp_path):
    return toy_source(write_toy(tmp_path / "data"), tmp_path / "cache").open()


def assert_same(repacked, source):
    assert repacked.fingerprint == source.fingerprint
    assert repacked.cameras == source.cameras
    assert list(repacked.prompts) == list(source.prompts)
    assert list(repacked.episode_ids) == list(source.episode_ids)
    np.testing.assert_array_equal(repacked.episode_ends, source.episode_ends, strict=True)
    np.testing.assert_array_equal(repacked.prompt_index, source.prompt_index, strict=True)
    assert set(repacked.columns) == set(source.columns)
    for name, column in source.columns.items():
        np.testing.assert_array_equal(repacked.columns[name], column, strict=True)
        assert isinstance(repacked.columns[name], np.memmap)
    steps = np.random.default_rng(0).permutation(source.num_steps)
    for camera in source.cameras:
        assert all(repacked.encoded(step, camera) == source.encoded(step, camera) for step in range(source.num_steps))
        np.testing.assert_array_equal(repacked.frames(steps, camera), source.frames(steps, camera))


@pytest.mark.slow
def test_repacked_bridge_equals_its_source(bridge_sample, tmp_path):
    source = Rlds(path=str(bridge_sample), cache_dir=str(tmp_path / "cache")).open()
    path = repack(source, tmp_path / "out", steps_per_file=64)
    assert sorted(file.name for file in path.iterdir() if "array_record" not in file.name) == [
        "manifest.json",
        "tables",
    ]
    assert len(list(path.glob("*.array_record"))) == 4
    repacked = StepArray(path=str(path)).open()
    assert_same(repacked, source)
    assert_same(pickle.loads(pickle.dumps(repacked)), source)
    assert repacked.describe(70) == f"{path}/steps-00001.array_record, record 6, episode 7, step 0 of 10"


def test_a_copy_is_opened_by_the_path_of_an_rlds_dataset(source, tmp_path):
    path = str(repack(source, tmp_path / "copy", split="train"))
    assert_same(Rlds(path=path).open(), source)
    with pytest.raises(ValueError, match="holds split 'train', not 'val'; repack that one too"):
        Rlds(path=path, split="val").open()


def test_two_repacks_after_each_other_are_equal(source, tmp_path):
    first = StepArray(path=str(repack(source, tmp_path / "a", steps_per_file=7))).open()
    assert_same(StepArray(path=str(repack(first, tmp_path / "b", steps_per_file=1000))).open(), source)


def test_interrupted_repack_goes_on_where_it_stopped(source, tmp_path, monkeypatch):
    written, write_file = [], repack_module._write_file

    def interrupted(source, path, steps):
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(path.name)
        write_file(source, path, steps)

    monkeypatch.setattr(repack_module, "_write_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        repack(source, tmp_path / "out", steps_per_file=8)
    assert not (tmp_path / "out").exists()
    with pytest.raises(FileNotFoundError, match="holds no repacked dataset"):
        StepArray(path=str(tmp_path / "out.partial")).open()
    with pytest.raises(ValueError, match="was begun with other steps_per_file: give the same again, or remove it"):
        repack(source, tmp_path / "out", steps_per_file=9)
    done = written.copy()
    written.clear()
    monkeypatch.setattr(repack_module, "_write_file", lambda *rest: (written.append(rest[1].name), write_file(*rest)))
    path = repack(source, tmp_path / "out", steps_per_file=8)
    assert len(done) == 3 and not set(done) & set(written)
    assert not (tmp_path / "out.partial").exists()
    assert_same(StepArray(path=str(path)).open(), source)


def test_existing_directory_is_never_overwritten(source, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError, match="exists already; choose another directory"):
        repack(source, tmp_path / "out")


def test_missing_torn_and_flipped_files_are_named(source, tmp_path):
    path = repack(source, tmp_path / "out", steps_per_file=30)
    file = path / "steps-00001.array_record"
    data = file.read_bytes()
    picture = source.encoded(33, "observation/wrist")
    position = data.index(picture) + len(picture) // 2
    file.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
    damaged = StepArray(path=str(path)).open()
    damaged.frames(np.array([0, 32, 34]), "observation/wrist")
    with pytest.raises(BadRecord, match=r"steps-00001\.array_record, record 3, episode 7, step \d of 5.*hash mismatch"):
        damaged.frames(np.array([33]), "observation/wrist")
    file.write_bytes(data[:-10])
    with pytest.raises(ValueError, match=r"steps-00001\.array_record is truncated or missing"):
        StepArray(path=str(path)).open()
    file.unlink()
    with pytest.raises(ValueError, match=r"steps-00001\.array_record is truncated or missing \(None of"):
        StepArray(path=str(path)).open()


def test_unreadable_step_stops_the_repack_by_name(source, tmp_path, monkeypatch):
    def unreadable(step, camera):
        raise BadRecord(f"{source.describe(step)}, {camera}: gone")

    monkeypatch.setattr(source, "encoded", unreadable)
    with pytest.raises(BadRecord, match=r"record 0, episode 0, step 0 of 3, observation/image_0: gone"):
        repack(source, tmp_path / "out")


def test_full_disk_says_so(source, tmp_path, monkeypatch):
    class Full:
        def __init__(self, *_):
            raise RuntimeError("open() failed: No space left on device; opening x")

    from array_record.python import array_record_module

    monkeypatch.setattr(array_record_module, "ArrayRecordWriter", Full)
    with pytest.raises(OSError, match=r"cannot write .*: the disk is full\. Make room there") as caught:
        repack(source, tmp_path / "out")
    assert caught.value.errno == errno.ENOSPC


def test_unknown_camera_and_step_are_named(source, tmp_path):
    repacked = StepArray(path=str(repack(source, tmp_path / "out"))).open()
    with pytest.raises(KeyError, match="no camera 'x'"):
        repacked.frames(np.array([0]), "x")
    with pytest.raises(IndexError, match=r"is not in 0\.\."):
        repacked.encoded(source.num_steps, "observation/wrist")
    assert repacked.frames(np.array([], np.int64), "observation/wrist").shape == (0, 12, 16, 3)
