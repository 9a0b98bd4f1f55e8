"""A checkpoint's list of files: checksums of whole files, and every file looked at by one of the processes."""

import json
import zlib

import numpy as np

from openpi_train.interop.manifest import find_damage, write_manifest


def test_the_checksum_is_that_of_the_whole_file(tmp_path):
    content = np.random.default_rng(0).bytes((9 << 20) + 3)  # more than two of the pieces in which files are read
    (tmp_path / "large").write_bytes(content)
    write_manifest(tmp_path)
    listed = json.loads((tmp_path / "manifest.json").read_text())["files"]
    assert listed == {"large": [len(content), zlib.crc32(content)]}
    (tmp_path / "large").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "large is corrupt" in find_damage(tmp_path)


def test_processes_together_read_every_file_once(tmp_path):
    files = [tmp_path / f"file_{number}" for number in range(7)]
    for number, file in enumerate(files):
        file.write_bytes(bytes(number + 1))
    write_manifest(tmp_path)
    assert find_damage(tmp_path) == ""
    for file in files:
        content = file.read_bytes()
        file.write_bytes(b"x" * len(content))
        found = [find_damage(tmp_path, share=share, shares=3) for share in range(3)]
        assert [text for text in found if text] == [find_damage(tmp_path)]
        assert file.name in find_damage(tmp_path)
        file.write_bytes(content)


def test_one_process_finds_that_a_file_is_torn_or_missing(tmp_path):
    files = [tmp_path / f"file_{number}" for number in range(7)]
    for number, file in enumerate(files):
        file.write_bytes(bytes(number + 1))
    write_manifest(tmp_path)
    for file in files:
        content = file.read_bytes()
        file.write_bytes(content[:-1])
        (found,) = filter(None, (find_damage(tmp_path, share=share, shares=3) for share in range(3)))
        assert f"{file.name} is truncated" in found
        file.unlink()
        (found,) = filter(None, (find_damage(tmp_path, share=share, shares=3) for share in range(3)))
        assert f"{file.name} is missing" in found
        file.write_bytes(content)


def test_a_list_without_files_is_no_checkpoints(tmp_path):
    (tmp_path / "manifest.json").write_text('{"files": {}}')
    assert find_damage(tmp_path) == "manifest.json lists no file"
