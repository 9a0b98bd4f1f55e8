"""Which ends of a start count as a crash (`crash_loop.py`): a stop on request does not, and begins no new count."""

import json
import types

import pytest

from openpi_train.faults import PEER_LOST, PREEMPTED
from openpi_train.runtime import exits
from openpi_train.runtime.exits import Preempted
from openpi_train.training import crash_loop

RUN = types.SimpleNamespace(resume=True, resume_from=None)


@pytest.fixture
def ends(monkeypatch):
    """Ends this start of the run with a code, from wherever, as the watchdog does."""
    monkeypatch.setattr(exits, "_before_a_stop", None)
    monkeypatch.setattr(exits.logging, "shutdown", lambda: None)
    monkeypatch.setattr(exits.os, "_exit", lambda code: None)
    return exits.end


def in_vain(directory) -> int:
    return crash_loop.begin(RUN, directory)[0].in_vain


def test_a_stop_on_request_is_no_crash_and_no_progress(tmp_path, ends):
    """At a phase that can be abandoned the watchdog ends the process, and nothing is raised."""
    for expected in (0, 1, 2):
        assert in_vain(tmp_path) == expected
        ends(PEER_LOST)
    for _ in range(4):  # as on hosts that are taken away again and again
        assert in_vain(tmp_path) == 3
        ends(PREEMPTED)
    assert in_vain(tmp_path) == 3
    ends(PEER_LOST)
    assert in_vain(tmp_path) == 4


def test_a_step_that_ended_the_start_before_is_still_known_after_a_stop(tmp_path, ends):
    for _ in range(3):
        loop, _ = crash_loop.begin(RUN, tmp_path)
    crash_loop.record_step(tmp_path, loop, 23, list)
    ends(PEER_LOST)
    loop, _ = crash_loop.begin(RUN, tmp_path)
    assert loop.begun_step == 23
    crash_loop.record_step(tmp_path, loop, 21, list)
    ends(PREEMPTED)
    again, _ = crash_loop.begin(RUN, tmp_path)
    assert again == loop


def test_a_stop_within_the_training_counts_as_one_outside_of_it(tmp_path, ends):
    in_vain(tmp_path)
    ends(PEER_LOST)
    assert in_vain(tmp_path) == 1
    with pytest.raises(Preempted), crash_loop.counting(tmp_path):
        raise Preempted("asked to stop")
    ends(PREEMPTED)
    assert in_vain(tmp_path) == 1


def test_a_checkpoint_begins_a_new_count_however_the_start_ends(tmp_path, ends):
    for _ in range(3):
        in_vain(tmp_path)
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "manifest.json").write_text(json.dumps({"files": {}}))
    ends(PREEMPTED)
    assert in_vain(tmp_path) == 0
    ends(PREEMPTED)
    assert not (tmp_path / crash_loop.NAME).exists(), "a run that is well leaves nothing behind"


def test_after_an_end_of_which_a_restart_mends_nothing_the_count_begins_anew(tmp_path, ends):
    for _ in range(3):
        in_vain(tmp_path)
    with pytest.raises(KeyboardInterrupt), crash_loop.counting(tmp_path):
        raise KeyboardInterrupt
    assert in_vain(tmp_path) == 0
