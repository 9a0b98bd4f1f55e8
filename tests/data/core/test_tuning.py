"""`--num-workers auto` decides by arithmetic alone, here on made-up times."""

import pytest

from openpi_train.data.core import tuning
from openpi_train.data.core.tuning import WorkerTuner, usable_cores


def looks(tuner, *intervals):
    """The number of workers after each interval of (steps, step_s, wait_s, read_s)."""
    found = []
    for num_steps, step_s, wait_s, read_s in intervals:
        tuner.look(num_steps, step_s, wait_s, lambda read_s=read_s: read_s)
        found.append(tuner.num_workers)
    return found


def test_threads_stay_where_the_loop_does_not_wait_or_was_not_watched_long_enough():
    tuner = WorkerTuner(15)
    assert looks(tuner, (100, 1.0, 0.02, 5.0), (9, 1.0, 0.9, 5.0)) == [0, 0]
    assert looks(tuner, (1, 1.0, 0.9, 5.0)) == [15], "ten seconds are enough"


def test_as_many_processes_read_as_the_step_needs_and_a_fifth_more():
    # Without waiting a step takes 0.5 s; a core needs 2 s for its batch: 4 of them, and a fifth.
    assert looks(WorkerTuner(15), (20, 0.8, 0.3, 2.0)) == [5]
    assert looks(WorkerTuner(3), (20, 0.9, 0.4, 2.0)) == [3], "no more than there are cores"


def test_processes_that_would_be_no_faster_are_not_started_and_that_is_said_once(caplog):
    caplog.set_level("INFO")
    # One core reads a batch in 2 s; the threads together give one every 0.9 s.
    assert looks(WorkerTuner(1), *[(20, 0.9, 0.5, 2.0)] * 3) == [0] * 3
    assert caplog.text.count("6 processes (at most 1) would not be faster") == 1
    assert looks(WorkerTuner(0), (20, 0.9, 0.5, 2.0)) == [0]
    assert looks(WorkerTuner(15), (20, 0.9, 0.5, 0.3)) == [0], "one core would do: it is the storage"


def test_more_are_started_while_the_loop_still_waits_but_never_fewer():
    tuner = WorkerTuner(15)
    assert looks(tuner, (20, 0.8, 0.3, 2.0)) == [5]
    # The first interval of the five counts for nothing; then they prove slower than they were measured to be.
    assert looks(tuner, (20, 2.0, 1.5, 9.0), (20, 0.8, 0.3, 4.0)) == [5, 10]
    assert looks(tuner, (20, 2.0, 1.5, 9.0), (20, 0.6, 0.1, 1.0)) == [10, 10]


@pytest.mark.parametrize(("limit", "cores"), [("max 100000", 8), ("250000 100000", 2), ("20000 100000", 1)])
def test_the_cores_are_those_of_the_affinity_and_of_the_cgroup(tmp_path, monkeypatch, limit, cores):
    monkeypatch.setattr(tuning.os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(tuning, "_CPU_LIMIT", tmp_path / "cpu.max")
    assert usable_cores() == 8
    (tmp_path / "cpu.max").write_text(limit + "\n")
    assert usable_cores() == cores
