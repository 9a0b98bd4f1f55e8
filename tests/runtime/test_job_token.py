"""The secret of a start: nobody else reads it, it is never left behind, and its proof is RFC 2104's."""

import os
import stat

import pytest

from openpi_train.runtime import job_token
from openpi_train.runtime.exits import UsageError
from openpi_train.runtime.job_token import TokenFile, given_token, is_proof, proof, read_token


def test_a_proof_is_the_hmac_of_what_is_said():
    # printf '["process", "a"]' | openssl dgst -sha256 -hmac key
    assert proof("key", "process", "a") == "9599f6755c2aa230dc83e13ff1175650d29aa7f37de55d64dd258506145f9488"
    assert is_proof(proof("key", "process", "a"), "key", "process", "a")


@pytest.mark.parametrize("given", [None, 5, "", "\ud800", proof("key", "a")[:-1], proof("key", "b"), proof("", "a")])
def test_what_is_no_proof_is_none(given):
    assert not is_proof(given, "key", "a")


def test_where_a_text_ends_is_part_of_the_proof():
    assert not is_proof(proof("key", "ab", "c"), "key", "a", "bc")


def test_a_token_file_is_for_its_owner_alone_and_is_removed(tmp_path):
    old_mask = os.umask(0)
    try:
        file = TokenFile.write(tmp_path / "runs")
    finally:
        os.umask(old_mask)
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert read_token(tmp_path / "runs", file.path.name) == file.token and file.token not in repr(file)
    assert TokenFile.write(tmp_path / "runs").token != file.token
    file.remove()
    assert not file.path.exists()


def test_the_file_of_a_start_that_was_killed_is_removed_after_a_day(tmp_path):
    files = [TokenFile.write(tmp_path) for _ in range(2)]
    os.utime(files[0].path, (0, 0))
    TokenFile.write(tmp_path)
    assert [file.path.exists() for file in files] == [False, True]


@pytest.mark.parametrize("name", ["", "x", "../.meeting-" + "0" * 32, ".meeting-" + "0" * 31 + "/", "/etc/passwd"])
def test_no_other_file_is_read_than_a_token(name, tmp_path):
    with pytest.raises(UsageError, match="is no name of a file with a job's token"):
        read_token(tmp_path, name)


def test_a_token_that_cannot_be_seen_is_told_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(job_token, "_LIMIT_S", 0.0)
    with pytest.raises(UsageError, match=r"same --checkpoint-base-dir.*one secret word in OPENPI_TRAIN_JOB_TOKEN"):
        read_token(tmp_path, ".meeting-" + "0" * 32)


def test_a_launchers_token_comes_from_the_variable_or_its_file(tmp_path, caplog):
    file = tmp_path / "token"
    file.write_text("from the file\n")
    file.chmod(0o600)
    variables = {"OPENPI_TRAIN_JOB_TOKEN_FILE": str(file)}
    assert given_token({}) is None
    assert given_token(variables) == "from the file" and not caplog.records
    assert given_token({**variables, "OPENPI_TRAIN_JOB_TOKEN": "given"}) == "given"
    file.chmod(0o640)
    given_token(variables)
    assert f"can be read by others on this machine (mode 0640): chmod 600 {file}" in caplog.text


@pytest.mark.parametrize(
    ("content", "says"), [("", "is empty"), (None, "cannot be read"), ("\udcff", "cannot be read")]
)
def test_a_token_file_that_says_nothing_is_named(content, says, tmp_path):
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(UsageError, match=says):
        given_token({"OPENPI_TRAIN_JOB_TOKEN_FILE": str(file)})
