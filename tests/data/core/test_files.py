"""Files that are either whole or absent."""

import io
import os

import pytest

from openpi_train.data.core.files import lines_from_the_end, write_bytes, write_json


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


@pytest.mark.parametrize("content", [b"", b"a\n", b"a\n\nlonger\n", b"\n\r\n", b"a\nbcd\ntorn"])
@pytest.mark.parametrize("block_bytes", [1, 2, 3, 64])
def test_lines_from_the_end_are_those_from_the_begin(tmp_path, content, block_bytes):
    (tmp_path / "file").write_bytes(content)
    lines = list(io.BytesIO(content))
    places = [sum(map(len, lines[:number])) for number in range(len(lines))]
    assert list(lines_from_the_end(tmp_path / "file", block_bytes)) == list(zip(places, lines, strict=True))[::-1]
