"""Two writers of one run where locks do not work: the older one ends and changes nothing of the newer one's."""

import errno
import os
import pathlib
import subprocess
import sys

import pytest

from openpi_train.checkpoints import fencing
from openpi_train.checkpoints.step_dirs import StepDirs
from openpi_train.runtime import passing_errors
from openpi_train.runtime.exits import StorageError, UsageError

# A start of the run on a disk without locks. It does each word that it reads, and says how that went.
WRITER = """
import errno, fcntl, os, pathlib, sys
number, directory = int(sys.argv[1]), pathlib.Path(sys.argv[2])
def flock(*_):
    raise OSError(number, os.strerror(number))
fcntl.flock = flock
from openpi_train.runtime.exits import RunError
from openpi_train.training import run_lock
from openpi_train.checkpoints.step_dirs import StepDirs
from openpi_train.training.metrics import MetricWriters
run_lock.hold(directory)
dirs = StepDirs(directory, keep_last=1, keep_period=None)
metrics = []
deeds = {
    "open": lambda: metrics.append(MetricWriters(directory, process_index=0, resume_step=3)),
    "log": lambda: metrics[0].log(int(sys.argv[3]), {"loss": 1.0}),
    "commit": lambda: dirs.commit(7),
    "link and delete": lambda: dirs.note_complete(5),
    "note a best": lambda: dirs.note_metric(5, 0.5),
    "clean": dirs.remove_left_overs,
    "go back": lambda: dirs.leave_after(1),
    "set aside": lambda: dirs.set_aside_damaged(5),
}
print("begun", flush=True)
for word in sys.stdin:
    try:
        deeds[word.strip()]()
        print("done", flush=True)
    except RunError as error:
        print(error.exit_code, error, flush=True)
"""

CLAIM = """
import pathlib, sys
from openpi_train.runtime.exits import UsageError
from openpi_train.checkpoints import fencing
for deed in (fencing.claim, fencing.require_owned):
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        deed(pathlib.Path(sys.argv[1]))
    except UsageError:
        sys.exit("lost")
print("owned")
"""


class Writer:
    def __init__(self, directory, number, step):
        command = [sys.executable, "-c", WRITER, str(number), str(directory), str(step)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout.readline() == "begun\n"

    def does(self, word):
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()


def contents(directory):
    """Every file with its bytes, and every link with its target."""
    return {
        str(path.relative_to(directory)): os.readlink(path)
        if path.is_symlink()
        else path.is_file() and path.read_bytes()
        for path in sorted(directory.rglob("*"))
    }


def checkpoint(directory, name):
    (directory / name).mkdir(parents=True)
    (directory / name / "manifest.json").write_text("{}")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP])
def test_without_locks_the_older_start_ends_and_leaves_all_as_it_is(number, tmp_path):
    run = tmp_path / "run"
    for name in ("1", "5", "7.saving"):
        checkpoint(run, name)
    (run / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in (1, 2, 3)))
    with Writer(run, number, 4) as older:
        assert older.does("open") == older.does("log") == "done"
        with Writer(run, number, 5) as newer:
            assert newer.does("open") == "done"
            before = contents(run)
            assert b'"step": 4' not in before["metrics.jsonl"], "the newer one trains it again"
            for word in ("log", "commit", "link and delete", "note a best", "clean", "go back", "set aside", "open"):
                code, _, message = older.does(word).partition(" ")
                assert code == "2", word
                assert f"a newer start of the run owns {run}: generation 2, process {newer.process.pid} on" in message
                assert f"This older one (generation 1, process {older.process.pid}" in message
                assert contents(run) == before, word
            for word in ("log", "commit", "link and delete", "clean"):
                assert newer.does(word) == "done"
    assert (run / "metrics.jsonl").read_text().endswith('{"step": 5, "loss": 1.0}\n')


def test_of_starts_that_claim_at_once_one_has_the_run(tmp_path):
    command = [sys.executable, "-c", CLAIM, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    starts = [subprocess.Popen(command, **pipes) for _ in range(3)]
    try:
        for _ in range(2):
            lines = [start.stdout.readline() for start in starts]
            assert all(line in ("ready\n", "") for line in lines) and "ready\n" in lines
            for start, line in zip(starts, lines, strict=True):
                if line:
                    start.stdin.write("\n")
                    start.stdin.flush()
        assert sorted(start.communicate(timeout=60)[0] for start in starts)[-1] == "owned\n"
        assert sorted(start.returncode for start in starts) == [0, 1, 1]
    finally:
        for start in starts:
            start.kill()
            start.wait()


def test_a_file_that_was_deleted_alone_is_put_back_and_a_directory_is_not(tmp_path):
    run = tmp_path / "run"
    fencing.claim(run)
    own = (run / fencing.NAME).read_text()
    (run / fencing.NAME).unlink()
    fencing.require_owned(run)
    assert (run / fencing.NAME).read_text() == own
    run.rename(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="run was moved or removed"):
        fencing.require_owned(run)
    assert not run.exists()


def test_an_emptied_file_ends_no_run(tmp_path):
    fencing.claim(tmp_path)
    own = (tmp_path / fencing.NAME).read_text()
    (tmp_path / fencing.NAME).write_text("")
    fencing.require_owned(tmp_path)
    assert (tmp_path / fencing.NAME).read_text() == own


@pytest.mark.parametrize("since", ["2026-01-01 10:00:00+0000, 0011", "2026-01-01 10:00:00+0200, 0011"])
def test_the_claim_of_an_older_start_means_another_file_system(since, tmp_path):
    """As where a restart began on the empty folder below a mount that came back later."""
    fencing.claim(tmp_path)
    older = f"generation 1, process 7 on elsewhere (since {since})\n"
    (tmp_path / fencing.NAME).write_text(older)
    with pytest.raises(StorageError, match="is not the directory that this start"):
        fencing.require_owned(tmp_path)
    assert (tmp_path / fencing.NAME).read_text() == older


def test_whoever_never_claimed_a_directory_is_not_asked(tmp_path):
    (tmp_path / fencing.NAME).write_text("generation 7, somebody else\n")
    fencing.require_owned(tmp_path)


@pytest.mark.parametrize("content", ["", "7\n", "generation x", "\x00\xff"])
def test_damaged_contents_are_replaced_by_a_new_start(content, tmp_path):
    (tmp_path / fencing.NAME).write_bytes(content.encode("latin-1"))
    fencing.claim(tmp_path)
    assert (tmp_path / fencing.NAME).read_text().startswith("generation 1, process ")


def test_a_file_server_that_is_away_takes_no_run_from_its_owner(tmp_path, monkeypatch):
    fencing.claim(tmp_path)
    dirs = StepDirs(tmp_path, keep_last=1, keep_period=None)
    checkpoint(tmp_path, "1")
    checkpoint(tmp_path, "2")

    def read(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(pathlib.Path, "read_text", read)
    monkeypatch.setattr(passing_errors, "_LIMIT_S", 0.0)
    monkeypatch.setattr(fencing.patiently, "__kwdefaults__", {"limit_s": 0.0})
    fencing.require_owned_if_readable(tmp_path)
    dirs.note_complete(2)
    assert dirs.path(1).exists(), "who cannot ask deletes nothing, and the save is whole"
    with pytest.raises(StorageError):
        fencing.require_owned(tmp_path)
