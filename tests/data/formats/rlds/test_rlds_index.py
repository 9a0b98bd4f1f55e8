"""The index's life: reuse, resumption, damage, and two processes at once."""

import errno
import fcntl
import logging
import multiprocessing
import os
import shutil
import signal
import stat
import threading
import time

import numpy as np
import pytest
import tensorflow_datasets as tfds
from rlds_toy import toy_episodes, toy_features, toy_source, write_toy

from openpi_train.data.check.examined import ExaminedData
from openpi_train.data.check.fault_kinds import examine
from openpi_train.data.core import progress, tables
from openpi_train.data.core.source import BadRecord
from openpi_train.data.formats import sidecar
from openpi_train.data.formats.rlds import rlds_index
from openpi_train.data.formats.rlds.rlds_writer import write_rlds
from openpi_train.data.formats.rlds.tfrecord import read_records
from openpi_train.runtime.exits import DataError


@pytest.fixture
def toy(tmp_path):
    return write_toy(tmp_path / "data")


@pytest.fixture
def scanned(monkeypatch):
    """Names of the shards that are read, in order."""
    names, scan = [], rlds_index.scan_shard

    def recording(directory, shard, *rest):
        names.append(shard.name)
        return scan(directory, shard, *rest)

    monkeypatch.setattr(rlds_index, "scan_shard", recording)
    return names


def shard_paths(toy):
    return sorted(toy.glob("*.tfrecord-*"))


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_second_open_reads_no_shard(toy, tmp_path, scanned):
    first = toy_source(toy, tmp_path / "cache").open()
    assert sorted(scanned) == [path.name for path in shard_paths(toy)]
    scanned.clear()
    assert toy_source(toy, tmp_path / "cache").open().fingerprint == first.fingerprint
    assert scanned == []


def test_result_does_not_depend_on_the_number_of_threads(toy, tmp_path):
    one = toy_source(toy, tmp_path / "one", build_workers=1).open()
    many = toy_source(toy, tmp_path / "many", build_workers=7).open()
    assert one.fingerprint == many.fingerprint
    for name, array in one.stored.arrays.items():
        np.testing.assert_array_equal(array, many.stored.arrays[name], strict=True)


def test_changed_shard_alone_is_read_again(toy, tmp_path, scanned, caplog):
    before = toy_source(toy, tmp_path / "cache").open()
    scanned.clear()
    paths = shard_paths(toy)
    # Another dataset's shard of the same name: other content, other size.
    other = write_toy(tmp_path / "other", seeds=range(50, 62))
    shutil.copy(shard_paths(other)[0], paths[1])
    os.utime(paths[1], ns=(1, 1))
    with caplog.at_level(logging.INFO):
        # The record count may differ from dataset_info.json's; then the lost episodes are left out.
        after = toy_source(toy, tmp_path / "cache", on_bad_record="skip").open()
    assert scanned == [paths[1].name]
    assert f"{paths[1].name} changed since its index was built" in caplog.text
    assert after.fingerprint != before.fingerprint
    root = after.stored.root
    assert len(list(root.glob("parts/*"))) == len(paths)
    assert len(list(root.glob("tables-*"))) == 1


def test_touched_shard_is_read_again_and_keeps_the_fingerprint(toy, tmp_path, scanned):
    before = toy_source(toy, tmp_path / "cache").open()
    scanned.clear()
    os.utime(shard_paths(toy)[0], ns=(1, 1))
    assert toy_source(toy, tmp_path / "cache").open().fingerprint == before.fingerprint
    assert scanned == [shard_paths(toy)[0].name]  # its size is the same, and yet its content could be another


def test_shard_that_changes_under_a_run_is_a_bad_record(toy, tmp_path):
    source = toy_source(toy, tmp_path / "cache").open()
    path = shard_paths(toy)[0]
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(DataError, match=r"record 0, episode 0, step 0 of 3.*file changed since its index was built"):
        source.frames(np.array([0]), "observation/wrist")


def test_interrupted_build_goes_on_where_it_stopped(toy, tmp_path, monkeypatch):
    names, scan = [], rlds_index.scan_shard

    def interrupted(directory, shard, *rest):
        if len(names) == 2:
            raise KeyboardInterrupt
        names.append(shard.name)
        return scan(directory, shard, *rest)

    monkeypatch.setattr(rlds_index, "scan_shard", interrupted)
    with pytest.raises(KeyboardInterrupt):
        toy_source(toy, tmp_path / "cache", build_workers=1).open()
    done = list(names)

    def recording(directory, shard, *rest):
        names.append(shard.name)
        return scan(directory, shard, *rest)

    names.clear()
    monkeypatch.setattr(rlds_index, "scan_shard", recording)
    source = toy_source(toy, tmp_path / "cache").open()
    assert len(done) == 2 and not set(done) & set(names)
    assert len(names) == len(shard_paths(toy)) - 2
    assert source.fingerprint == toy_source(toy, tmp_path / "fresh").open().fingerprint


def test_flipped_byte_is_named_and_skipped_on_request(toy, tmp_path, scanned, caplog):
    path = shard_paths(toy)[1]
    records = list(read_records(path))
    flip(path, records[0].offset + len(records[0].payload) // 2)
    match = rf"1 episodes of .* cannot be read:\n  {path.name}, record 0 .*checksum(.|\n)*--data.on-bad-record skip"
    with pytest.raises(BadRecord, match=match):
        toy_source(toy, tmp_path / "cache").open()
    scanned.clear()
    source = toy_source(toy, tmp_path / "cache", on_bad_record="skip").open()
    assert scanned == []  # what was read to find the damage is not read again
    assert (source.num_episodes, source.num_dropped) == (11, 1)
    assert "are left out" in caplog.text
    assert source.stored.manifest["dropped"][0]["record"] == 0
    whole = toy_source(write_toy(tmp_path / "whole"), tmp_path / "cache").open()
    position = len(list(read_records(shard_paths(toy)[0])))
    assert list(source.episode_ids) == [*whole.episode_ids[:position], *whole.episode_ids[position + 1 :]]
    # Record numbers after the gap are the file's own.
    assert f"record 1, episode {position}," in source.describe(int(source.episode_ends[position - 1]))
    last = [opened.frames(np.array([opened.num_steps - 1]), "observation/wrist") for opened in (source, whole)]
    np.testing.assert_array_equal(*last)


def test_torn_file_loses_its_rest_and_says_so(toy, tmp_path):
    path = shard_paths(toy)[0]
    records = list(read_records(path))
    path.write_bytes(path.read_bytes()[: records[1].offset + 10])
    with pytest.raises(
        BadRecord, match=rf"{len(records) - 1} episodes .*\n  {path.name}, record 1 .*file is truncated"
    ):
        toy_source(toy, tmp_path / "cache").open()
    source = toy_source(toy, tmp_path / "cache", on_bad_record="skip").open()
    assert source.num_dropped == len(records) - 1
    assert source.num_episodes == 12 - source.num_dropped


def test_file_that_ends_between_records_is_noticed_by_its_count(toy, tmp_path):
    path = shard_paths(toy)[0]
    records = list(read_records(path))
    path.write_bytes(path.read_bytes()[: records[-1].offset - 12])
    with pytest.raises(BadRecord, match=rf"the file ends after {len(records) - 1} records; dataset_info.json says"):
        toy_source(toy, tmp_path / "cache").open()


def test_damaged_index_file_is_named_and_made_again(toy, tmp_path, scanned, caplog):
    source = toy_source(toy, tmp_path / "cache").open()
    root, name = source.stored.root, source.stored.manifest["tables"]
    part, actions = min(root.glob("parts/*")), np.array(source.columns["action"])
    harms = {
        f"{root / name / 'columns/action.npy'} is damaged": lambda: flip(root / name / "columns/action.npy", -1),
        f"{root / name / 'prompts.json'} is missing": (root / name / "prompts.json").unlink,
        "is damaged (KeyError('shards')": lambda: (root / "manifest.json").write_text(
            f'{{"format": {sidecar.FORMAT}, "metadata_sha256": "{source.stored.manifest["metadata_sha256"]}"}}'
        ),
        "manifest.json cannot be read": lambda: (root / "manifest.json").write_text("{torn"),
    }
    scanned.clear()
    for said, harm in harms.items():
        caplog.clear()
        harm()
        again = toy_source(toy, tmp_path / "cache").open()
        assert said in caplog.text
        np.testing.assert_array_equal(again.columns["action"], actions)
        assert again.fingerprint == source.fingerprint
        assert toy_source(toy, tmp_path / "cache").is_ready()
    assert scanned == []  # its parts were whole
    flip(part, len(part.read_bytes()) // 2)
    (root / "manifest.json").unlink()
    assert toy_source(toy, tmp_path / "cache").open().fingerprint == source.fingerprint
    assert f"{part} is damaged" in caplog.text and len(scanned) == 1


@pytest.mark.parametrize(
    ("number", "reason"), [(errno.ENOSPC, "the disk is full"), (errno.EROFS, "the file system is read-only")]
)
def test_cache_that_cannot_be_written_says_why_and_what_to_do(toy, tmp_path, monkeypatch, number, reason):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tables, "write_array", refuse)
    with pytest.raises(OSError, match=rf"cannot write .*: {reason}\. Make room there or point .*cache-dir"):
        toy_source(toy, tmp_path / "cache").open()
    monkeypatch.undo()
    assert toy_source(toy, tmp_path / "cache").open().num_episodes == 12


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_cache_without_permission_says_so(toy, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(OSError, match="writing there is not permitted"):
        toy_source(toy, cache).open()


def test_progress_is_logged_while_building(toy, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(progress, "_REPORT_S", 0.0)
    with caplog.at_level(logging.INFO):
        toy_source(toy, tmp_path / "cache").open()
    assert "MB/s, about" in caplog.text
    assert "index done in" in caplog.text and "12 episodes" in caplog.text


def test_second_builder_waits_and_says_for_whom(toy, tmp_path, caplog):
    built = toy_source(toy, tmp_path / "cache").open()
    root = built.stored.root
    (root / tables.MANIFEST).unlink()
    result = []
    with open(root / "lock", "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write("process 12345 on otherhost, since today")
        file.flush()
        with caplog.at_level(logging.INFO):
            thread = threading.Thread(target=lambda: result.append(toy_source(toy, tmp_path / "cache").open()))
            thread.start()
            deadline = time.monotonic() + 20
            while "waiting for" not in caplog.text and time.monotonic() < deadline:
                time.sleep(0.02)
            assert "waiting for process 12345 on otherhost, since today" in caplog.text
            assert not result
    thread.join(20)
    assert result[0].fingerprint == built.fingerprint


def killed_after_two_shards(path, cache):
    scan, count = rlds_index.scan_shard, []

    def killing(*arguments):
        if len(count) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        count.append(0)
        return scan(*arguments)

    rlds_index.scan_shard = killing
    toy_source(path, cache, build_workers=1).open()


@pytest.mark.multiprocess
def test_killed_build_leaves_its_finished_shards_and_no_lock(toy, tmp_path, scanned):
    process = multiprocessing.get_context("spawn").Process(
        target=killed_after_two_shards, args=(toy, tmp_path / "cache")
    )
    process.start()
    process.join(240)
    assert process.exitcode == -signal.SIGKILL
    source = toy_source(toy, tmp_path / "cache").open()
    assert sorted(scanned) == [path.name for path in shard_paths(toy)[2:]]
    assert source.fingerprint == toy_source(toy, tmp_path / "fresh").open().fingerprint


def test_unreadable_shard_is_not_blamed_on_the_cache(toy, tmp_path, monkeypatch):
    def refuse(directory, shard, *_):
        raise PermissionError(errno.EACCES, "Permission denied", str(directory / shard.name))

    monkeypatch.setattr(rlds_index, "scan_shard", refuse)
    with pytest.raises(PermissionError, match=r"Permission denied: .*toy-train"):
        toy_source(toy, tmp_path / "cache", build_workers=1).open()


def open_together(path, cache, barrier, queue):
    barrier.wait(240)
    source = toy_source(path, cache).open()
    queue.put((source.fingerprint, int(source.frames(np.array([5]), "observation/wrist").sum())))


@pytest.mark.multiprocess
def test_processes_that_open_at_once_get_one_sound_index(toy, tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(3), context.Queue()
    processes = [
        context.Process(target=open_together, args=(toy, tmp_path / "cache", barrier, queue)) for _ in range(3)
    ]
    for process in processes:
        process.start()
    results = {queue.get(timeout=240) for _ in processes}
    for process in processes:
        process.join(240)
        assert process.exitcode == 0
    source = toy_source(toy, tmp_path / "fresh").open()
    assert results == {(source.fingerprint, int(source.frames(np.array([5]), "observation/wrist").sum()))}


@pytest.mark.parametrize("kind", [np.bool_, np.float32, np.int64])
def test_a_flag_that_is_given_once_for_an_episode_is_a_column_and_changes_no_identity(tmp_path, kind):
    features = toy_features()
    described = tfds.features.FeaturesDict(
        {
            "steps": features["steps"],
            "episode_metadata": {**dict(features["episode_metadata"].items()), "success": kind, "other": np.int64},
        }
    )
    plain = list(toy_episodes(range(4)))
    flagged = [
        {**one, "episode_metadata": {**one["episode_metadata"], "success": kind(number % 2), "other": 1}}
        for number, one in enumerate(toy_episodes(range(4)))
    ]
    written = write_rlds(tmp_path / "a", name="toy", version="1.0.0", features=described, splits={"train": flagged})
    without = write_rlds(tmp_path / "b", name="toy", version="1.0.0", features=features, splits={"train": plain})
    source = toy_source(written, tmp_path / "cache").open()
    ends = source.episode_ends.tolist()
    column = source.columns["episode_metadata/success"]
    assert [column[end - 1] for end in ends] == [0, 1, 0, 1] and column[0] == column[ends[0] - 1]
    assert "episode_metadata/other" not in source.columns
    assert source.about().left_out.keys() >= {"episode_metadata/other"}
    assert "episode_metadata/success" not in source.about().left_out
    assert list(source.episode_ids) == list(toy_source(without, tmp_path / "cache").open().episode_ids)
    found = examine(ExaminedData(name="toy", source=source))
    (flags,) = (one for one in found if one.kind == "flags in some episodes only")
    assert (flags.count, flags.total) == (2, 4) and "episode 0" in flags.where
