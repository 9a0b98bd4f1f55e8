"""Files that are either whole or absent."""

import os

import pytest

from openpi_train.data.files import write_bytes, write_json


def test_a_write_that_is_cut_off_leaves_the_file_that_was_there(tmp_path, monkeypatch):
    path = tmp_path / "folder" / "file"
    write_bytes(path, b"old and whole")
    seen = []

    def fail(_):
        seen.append(path.read_bytes())  # what another process would read meanwhile
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_bytes(path, b"new")
    assert seen == [b"old and whole"]
    assert path.read_bytes() == b"old and whole"
    assert list(path.parent.iterdir()) == [path], "no draft is left"


def test_what_json_cannot_say_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="Out of range"):
        write_json(tmp_path / "file", {"loss": float("nan")})
    assert not any(tmp_path.iterdir())
