"""How long a stop takes, in words and as a warning ahead of it; the stop itself is in `test_session.py`."""

import datetime

import pytest

from openpi_train.runtime import phases, preempt
from openpi_train.runtime.exits import UsageError
from openpi_train.runtime.preempt import StopTimes


def test_the_words_part_the_time_at_the_end_of_the_step():
    times = StopTimes(until_stopped_s=2.14, until_saved_s=3.2)
    assert times.words() == "3.2 s after the request (2.1 s to the end of the step, 1.1 s to save)"


def test_nobody_was_asked_and_nothing_is_said():
    assert preempt.stop_times() is None and not preempt.stop_noticed()


def test_the_request_is_timed_by_the_note_of_jax(monkeypatch):
    noticed = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=7)
    # As jaxlib writes it, with nanoseconds.
    note = noticed.strftime("%Y-%m-%dT%H:%M:%S.%f") + "123+00:00"
    monkeypatch.setattr(preempt, "_notice", lambda: note)
    assert preempt.stop_times() is None, "the processes have not agreed to stop yet"
    monkeypatch.setattr(preempt, "_stopping", False)
    monkeypatch.setattr(preempt, "_stopped_after_s", None)
    monkeypatch.setattr(preempt.multihost_utils, "reached_preemption_sync_point", lambda point: True)
    assert preempt.stop_requested()
    monkeypatch.setattr(preempt, "_notice", lambda: "in a way that no jax has written it yet")
    assert preempt.stop_times() is None
    monkeypatch.setattr(preempt, "_notice", lambda: note)
    times = preempt.stop_times()
    assert times is not None and 7.0 <= times.until_stopped_s <= times.until_saved_s < 60.0
    # An iteration that is ended first counts as the step.
    monkeypatch.setattr(preempt, "_stopped_after_s", 1.0)
    preempt.note_stopped()
    times = preempt.stop_times()
    assert times is not None and times.until_stopped_s >= 7.0


@pytest.fixture
def steps_of_3_s(monkeypatch):
    monkeypatch.setattr(phases, "usual_step_s", lambda: 3.0)
    monkeypatch.setattr(preempt, "_warned", False)


@pytest.mark.parametrize(("grace", "warnings"), [("30", 0), ("20", 1), (None, 0)])
def test_a_grace_period_too_short_for_two_steps_and_a_save_is_warned_of_once(
    steps_of_3_s, monkeypatch, caplog, grace, warnings
):
    caplog.set_level("INFO", logger="openpi_train")
    if grace:
        monkeypatch.setenv(preempt.GRACE_VARIABLE, grace)
    for step in (10, 20):
        preempt.note_save(step, 15.0, 2_500_000_000)
    messages = [record.message for record in caplog.records]
    assert "checkpoint 20 is complete: 2,500.0 MB, 15.0 s after its save began" in messages
    said = [
        message
        for message in messages
        if "a stop on request takes 21 s here (6 s to the end of a step, 15 s to save)" in message
    ]
    assert len(said) == warnings == len(messages) - 2
    assert all("--stop-before-s" in message and "--grace-s" in message for message in said)


def test_a_grace_period_that_is_no_number_is_refused_at_the_start(monkeypatch):
    monkeypatch.setenv(preempt.GRACE_VARIABLE, "2m")
    with pytest.raises(UsageError, match="OPENPI_TRAIN_GRACE_S='2m' in the environment is not a number of seconds"):
        with preempt.stoppable_start():
            pass
