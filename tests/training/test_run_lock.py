"""Two starts of one run: the second waits for the first one's end, and is refused where that does not come."""

import dataclasses
import errno
import json
import logging
import os
import platform
import subprocess
import sys
import threading

import pytest
from openpi_train_configs.debug import debug

from openpi_train.checkpoints import fencing
from openpi_train.fields import as_json
from openpi_train.runtime import locks, waiting
from openpi_train.runtime.exits import USAGE, UsageError
from openpi_train.training import run_lock
from openpi_train.training.rundir import open_run

HOLD = """
import pathlib, sys
from openpi_train.training import run_lock
run_lock.hold(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path):
    """Another process that holds the run in tmp_path/debug/x until it is ended."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "debug" / "x")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def request(base, **flags):
    return dataclasses.replace(debug, name="debug", checkpoint_base_dir=str(base), exp_name="x", **flags)


@pytest.mark.parametrize("flags", [{"resume": True}, {"overwrite": True}])
def test_a_run_that_another_process_has_is_waited_for_then_refused_and_left_as_it_is(
    other, tmp_path, flags, monkeypatch, caplog
):
    place = tmp_path / "debug" / "x"
    (place / "experiment.json").write_text(json.dumps(as_json(request(tmp_path))))
    (place / "70.orbax-checkpoint-tmp").mkdir()
    before = sorted(path.name for path in place.iterdir())
    monkeypatch.setattr(run_lock, "LIMIT_S", 0.5)
    monkeypatch.setattr(waiting, "REPORT_EVERY_S", 0.0)
    holder = rf"process {other.pid} on {platform.node()} \(since \d{{4}}-"
    with caplog.at_level(logging.INFO), pytest.raises(UsageError, match=rf"in use: {holder}.*another --exp-name") as no:
        open_run(request(tmp_path, **flags))
    assert no.value.exit_code == USAGE
    assert f"the run in {place}: waiting for process {other.pid} on" in caplog.text
    assert [path.name for path in (tmp_path / "debug").iterdir()] == ["x"]
    assert sorted(path.name for path in place.iterdir()) == before


def test_a_restart_takes_the_run_from_an_earlier_start_that_cannot_be_ended(other, tmp_path, monkeypatch, caplog):
    place = tmp_path / "debug" / "x"
    (place / "experiment.json").write_text(json.dumps(as_json(request(tmp_path))))
    before = (place / fencing.NAME).read_text()
    monkeypatch.setattr(run_lock, "LIMIT_S", 0.5)
    monkeypatch.setenv("OPENPI_TRAIN_RESTART", "1")
    assert open_run(request(tmp_path, resume=True)).resumed
    assert f"an earlier start of this run has not ended (process {other.pid} on" in caplog.text
    after = (place / fencing.NAME).read_text()
    assert before.startswith("generation 1,") and after.startswith(f"generation 2, process {os.getpid()} on")


def test_two_starts_of_a_new_run_are_kept_apart_too(other, tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "LIMIT_S", 0.0)
    with pytest.raises(UsageError, match="in use"):
        open_run(request(tmp_path))
    assert {path.name for path in (tmp_path / "debug" / "x").iterdir()} == {run_lock.NAME, fencing.NAME}


def test_a_killed_process_leaves_no_lock_behind(other, tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "LIMIT_S", 0.0)
    other.kill()
    other.wait()
    assert not open_run(request(tmp_path)).resumed, "a directory with nothing but a lock in it is free"
    assert (tmp_path / "debug/x/.lock").read_text().startswith(f"process {os.getpid()} on ")


@pytest.mark.slow
def test_a_start_that_waits_goes_on_when_the_one_before_has_ended(other, tmp_path):
    threading.Timer(1.0, other.stdin.close).start()
    open_run(request(tmp_path))
    assert other.poll() is not None or other.wait(240) == 0


def test_a_run_that_was_moved_aside_does_not_hold_up_the_new_one_of_its_name(other, tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "LIMIT_S", 0.0)
    (tmp_path / "debug" / "x").rename(tmp_path / "debug" / "x.replaced")
    open_run(request(tmp_path))


def test_after_overwrite_the_new_directory_is_locked(tmp_path):
    open_run(request(tmp_path))
    open_run(request(tmp_path, overwrite=True))
    limit = "run_lock.LIMIT_S = 0.0\nrun_lock.hold("
    command = [sys.executable, "-c", HOLD.replace("run_lock.hold(", limit), str(tmp_path / "debug" / "x")]
    second = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=240, check=False)
    assert f"in use: process {os.getpid()} on" in second.stderr


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EROFS])
def test_a_file_system_without_locks_is_warned_of_once(number, tmp_path, monkeypatch, caplog):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(locks.fcntl, "flock", flock)
    open_run(request(tmp_path))
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert os.strerror(number) in record.getMessage() and "cannot be locked" in record.getMessage()
