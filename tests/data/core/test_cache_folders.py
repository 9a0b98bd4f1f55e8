"""Where other programs keep what they download."""

import os
from pathlib import Path

import pytest
from huggingface_hub import file_download

from openpi_train.data.core import cache_folders
from openpi_train.data.formats.lerobot.lerobot_layout import read_layout


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path))
    return tmp_path


def downloaded(home: Path, revision: str) -> Path:
    """What LeRobot 0.6 makes: huggingface_hub's cache of the dataset, below `hub`."""
    name = file_download.repo_folder_name(repo_id="me/demos", repo_type="dataset")
    folder = home / "hub" / name / "snapshots" / revision
    folder.mkdir(parents=True)
    return folder


def test_a_lerobot_dataset_is_where_the_older_lerobot_puts_it_and_openpi_looks(home):
    assert cache_folders.lerobot("me/demos") == str(home / "me" / "demos")


def test_a_lerobot_dataset_is_the_newest_revision_that_lerobot_has_downloaded(home):
    older, newer = downloaded(home, "b" * 40), downloaded(home, "a" * 40)
    os.utime(older, (1, 1))
    assert cache_folders.lerobot("me/demos") == str(newer)


def test_a_folder_of_the_datasets_name_comes_before_the_cache(home):
    downloaded(home, "a" * 40)
    (home / "me" / "demos").mkdir(parents=True)
    assert cache_folders.lerobot("me/demos") == str(home / "me" / "demos")


def test_a_dataset_that_lerobot_has_not_downloaded_is_told_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path))
    said = cache_folders.how_to_download(cache_folders.lerobot("me/demos"))
    assert f"`hf download me/demos --repo-type dataset --local-dir {tmp_path / 'me' / 'demos'}`" in said
    assert cache_folders.how_to_download(tmp_path.parent / "elsewhere") == cache_folders.how_to_download(tmp_path) == ""
    with pytest.raises(FileNotFoundError, match=r"\(no meta/info.json\)\. With a network `hf download me/demos "):
        read_layout(tmp_path / "me" / "demos")
