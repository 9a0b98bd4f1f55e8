"""While the file system fails no dataset is judged: an index is complete, or it is not there."""

import errno
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from vla_project import write_episodes

from openpi_train.data.core import tables
from openpi_train.data.core.source import BadRecord
from openpi_train.data.formats.lerobot import LeRobot
from openpi_train.data.formats.lerobot.episodes import ParquetScan, copy_pictures
from openpi_train.data.formats.parquet import Parquet, parquet_index
from openpi_train.data.formats.zarr import Zarr
from openpi_train.data.formats.zarr.store import Store
from openpi_train.data.text.text_files import TextFile
from openpi_train.runtime.exits import DataError, StorageError

LEROBOT = Path(__file__).parent / "lerobot" / "fixtures"
ZARR = Path(__file__).parent / "zarr" / "fixtures" / "arms_14.zarr"
SYSTEM = [errno.ESTALE, errno.EIO, errno.EACCES, errno.ETIMEDOUT, errno.ENFILE, errno.ENOSPC]
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/mem and /dev/full are Linux's")


def failing(monkeypatch, owner, name: str, number: int, where: str = "") -> None:
    """Have a function fail, with the system's error, for files with `where` in their path."""
    sound = getattr(owner, name)

    def function(*given):
        if any(where in str(one) for one in given):
            raise OSError(number, "as pyarrow says, without a file's name")
        return sound(*given)

    monkeypatch.setattr(owner, name, function)


def kept(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file() and path.name != "lock"]


@pytest.mark.parametrize("number", SYSTEM)
@pytest.mark.parametrize("kind", ["lerobot", "parquet", "zarr"])
def test_an_index_is_not_built_while_the_system_fails_and_whole_afterwards(tmp_path, monkeypatch, kind, number):
    cache = tmp_path / "cache"
    config, fault = {
        "lerobot": (
            lambda **more: LeRobot(path=str(LEROBOT / "v21_image"), cache_dir=str(cache), **more),
            (ParquetScan, "_rows", number, "000001"),
        ),
        "parquet": (
            lambda **more: Parquet(path=str(write_episodes(tmp_path / "eps")), cache_dir=str(cache), **more),
            (parquet_index, "scan_file", number, "b.parquet"),
        ),
        "zarr": (
            lambda **more: Zarr(path=str(ZARR), cache_dir=str(cache), **more),
            (Store, "_opened", number, "data/state"),
        ),
    }[kind]
    # An error of contents in place of the system's would be an episode left out, here and for ever.
    given = config(on_bad_record="skip")
    with monkeypatch.context() as patch:
        failing(patch, *fault)
        with pytest.raises(OSError) as caught:
            given.open()
    assert not isinstance(caught.value, DataError) and caught.value.errno == number
    assert kept(cache) == []
    assert given.open().num_dropped == 0 and given.open().num_episodes == 3


@needs_linux
def test_a_video_that_cannot_be_read_is_no_damaged_video(tmp_path):
    shutil.copytree(LEROBOT / "v21_video", tmp_path / "v")
    video = next((tmp_path / "v").rglob("*wrist/episode_000001.mp4"))
    aside = video.rename(tmp_path / "aside")
    video.symlink_to("/proc/self/mem")  # reading its beginning is an I/O error
    config = LeRobot(path=str(tmp_path / "v"), cache_dir=str(tmp_path / "cache"), on_bad_record="skip")
    with pytest.raises(OSError, match=r"Input/output error: .*wrist/episode_000001\.mp4"):
        config.open()
    assert kept(tmp_path / "cache") == []
    video.unlink()
    aside.rename(video)
    assert config.open().num_episodes == 3


@needs_linux
def test_a_full_disk_is_told_as_one_and_left_as_it_was(tmp_path, monkeypatch):
    with pq.ParquetFile(LEROBOT / "v21_image/data/chunk-000/episode_000000.parquet") as file:
        with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"):
            copy_pictures(file, ["observation.images.front"], Path("/dev/full"))
    read = ParquetScan.read

    def onto_a_full_disk(self, file, pictures):
        pictures.symlink_to("/dev/full")
        return read(self, file, pictures)

    monkeypatch.setattr(ParquetScan, "read", onto_a_full_disk)
    cache = tmp_path / "cache"
    with pytest.raises(OSError, match=r"cannot write .*the disk is full\. Make room there or point .*cache-dir"):
        LeRobot(path=str(LEROBOT / "v21_image"), cache_dir=str(cache), on_bad_record="skip").open()
    assert kept(cache) == [] and not list(cache.rglob(".tables*"))


def test_a_step_that_the_system_cannot_read_ends_the_run_and_is_not_replaced(tmp_path, monkeypatch):
    from openpi_train.data.formats import spans

    source = LeRobot(path=str(LEROBOT / "v21_video"), cache_dir=str(tmp_path)).open()
    spans.open_file.cache_clear()
    with monkeypatch.context() as patch:
        failing(patch, spans.os, "open", errno.EACCES, "episode_000001.mp4")
        with pytest.raises(DataError, match=r"episode 1, step 2 of 17.*an error of the system, not damage") as caught:
            source.frames(np.array([22]), "observation/images/wrist")
    assert not isinstance(caught.value, BadRecord)
    assert source.frames(np.array([22]), "observation/images/wrist").any()
    store = Zarr(path=str(ZARR), cache_dir=str(tmp_path), decoded_copy=False).open()
    failing(monkeypatch, Store, "_opened", errno.ESTALE, "data/head_camera")
    with pytest.raises(StorageError, match="an error of the system"):  # this may pass
        store.frames(np.array([3]), "head_camera")


def test_texts_in_parquet_files_that_the_system_cannot_read_are_not_damaged(tmp_path):
    (tmp_path / "loop.parquet").symlink_to("loop.parquet")
    with pytest.raises(OSError, match=r"loop\.parquet") as caught:
        list(TextFile(tmp_path / "loop.parquet", "loop.parquet").records(["text"]))
    assert caught.value.errno == errno.ELOOP
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(BadRecord, match="the file is damaged"):
        list(TextFile(tmp_path / "torn.parquet", "torn.parquet").records(["text"]))


@needs_linux
@pytest.mark.parametrize("name", ["io.jsonl", "io.json", "io.jsonl.gz"])
def test_lines_of_texts_that_the_system_cannot_read_are_named(tmp_path, name):
    (tmp_path / name).symlink_to("/proc/self/mem")
    with pytest.raises(OSError, match=rf"Input/output error: '.*{name}'"):
        list(TextFile(tmp_path / name, name).records(["text"]))


def test_half_the_tables_of_a_dataset_do_not_fill_the_disk(tmp_path):
    with pytest.raises(OSError, match="full"), tables.drafted(tmp_path) as draft:
        (draft / "a.npy").write_bytes(b"x")
        raise OSError(errno.ENOSPC, "full")
    assert not list(tmp_path.iterdir())


def test_an_index_that_cannot_be_read_for_a_moment_is_not_built_again(tmp_path, monkeypatch):
    config = LeRobot(path=str(LEROBOT / "v21_image"), cache_dir=str(tmp_path))
    config.open()
    (manifest,) = tmp_path.rglob("manifest.json")
    built = manifest.stat().st_mtime_ns
    with monkeypatch.context() as patch:
        failing(patch, Path, "read_bytes", errno.ESTALE, "manifest.json")
        with pytest.raises(OSError, match=r"as pyarrow says.*manifest\.json"):
            config.open()
    config.open()
    assert manifest.stat().st_mtime_ns == built


def test_an_index_from_before_in_which_a_passing_error_may_be_kept_is_built_again(tmp_path):
    config = LeRobot(path=str(LEROBOT / "v21_image"), cache_dir=str(tmp_path))
    config.open()
    (path,) = tmp_path.rglob("manifest.json")
    manifest = json.loads(path.read_text())
    kept_error = {"file": "data/chunk-000/episode_000001.parquet", "episode": 1, "why": "[Errno 116] Stale file handle"}
    path.write_text(json.dumps({**manifest, "format": 1, "dropped": [kept_error]}))
    assert not config.is_ready() and config.open().num_dropped == 0
