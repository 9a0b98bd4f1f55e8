"""The loop's order of things, with a run that only takes notes."""

import contextlib
import inspect
import types
from pathlib import Path

import pytest

from openpi_train.runtime import preempt
from openpi_train.runtime.exits import Preempted
from openpi_train.runtime.preempt import StoppedError, StopTimes
from openpi_train.training import loop
from openpi_train.training.stopping import interrupted

train = inspect.unwrap(loop.train)  # without the run-time type check: it is given no real run


class NotingRun:
    """Stands for `Run`; the state is its step. `stop_at`: the step at which the processes agree to stop."""

    def __init__(self, first=0, total=6, stop_at=None):
        self.events, self._stop_at = [], stop_at
        self.state = types.SimpleNamespace(step=first)
        self.experiment = types.SimpleNamespace(num_train_steps=total, log_interval=2)
        self.step, self.directory = first, Path("runs/x y")
        self.recorder = types.SimpleNamespace(
            read=dict, check=lambda: self.events.append("check"), paused=contextlib.nullcontext
        )
        self.feed = types.SimpleNamespace(next=lambda state: None, can_be_saved=True)

    def compile_step(self, state):
        return lambda state, batch: (types.SimpleNamespace(step=state.step + 1), {})

    def catch_up(self, state):
        self.events.append(("catch up", state.step))

    def note(self, step, metrics):
        self.step = step

    def taking(self, step):
        return contextlib.nullcontext()

    def stop_requested(self):
        return self.step == self._stop_at

    def evaluation_is_due(self, step):
        return step in (3, 6)

    def evaluate(self, step, state):
        self.events.append(("evaluate", step))
        return True

    def save_is_due(self, step):
        return step in (4, 6)

    def local_save_is_due(self, step):
        return step in (4, 5)

    def finish(self):
        self.events.append("finish")

    def save(self, step, state, *, is_last=False):
        self.events.append(("save", step))
        return True

    def __getattr__(self, name):
        def noted(step, *_):
            self.events.append((name, step))

        return noted


def test_everything_happens_at_its_interval_and_at_the_end():
    run = NotingRun()
    assert train(run).step == 6
    assert run.events == [
        *[("catch up", 0), ("log", 2), ("log", 3), ("evaluate", 3), ("log", 4), "check", ("save", 4)],
        *["check", ("save_locally", 5), ("log", 6), ("evaluate", 6), "check", ("save", 6), "finish"],
    ]


def test_a_resumed_run_takes_the_steps_that_are_left():
    run = NotingRun(first=4)
    assert train(run).step == 6
    assert run.events == [
        *[("catch up", 4), "check", ("save_locally", 5)],
        *[("log", 6), ("evaluate", 6), "check", ("save", 6), "finish"],
    ]


def test_a_stop_saves_without_evaluating_and_says_how_to_go_on():
    run = NotingRun(stop_at=3)
    with pytest.raises(Preempted, match=r"step 3 of 6 .*--resume"):
        train(run)
    assert run.events[-4:] == [("log", 3), "check", ("save", 3), "finish"]


def test_saves_and_stops_wait_until_the_feed_can_be_saved():
    class Feed:
        can_be_saved = property(lambda self: run.step % 3 == 0)

        def next(self, state):
            return None

    run = NotingRun(total=10)
    run.feed, run.stop_requested = Feed(), lambda: run.step >= 5  # as the processes go on agreeing, once they have
    with pytest.raises(Preempted, match="stopped after step 6 of 10"):
        train(run)
    # Due at 4: put off; local ones at 4 and 5 are left out, since the next is near.
    assert [event for event in run.events if event[0].startswith("save")] == [("save", 6)]


def test_a_stop_says_how_long_it_took(monkeypatch):
    times = StopTimes(until_stopped_s=2.0, until_saved_s=3.5)
    monkeypatch.setattr(preempt, "stop_times", lambda: times)
    took = r"with a good checkpoint, 3.5 s after the request \(2.0 s to .*, 1.5 s to save\); continue with --resume, "
    took += "or: python -m openpi_train resume 'runs/x y'$"
    with pytest.raises(Preempted, match=took):
        train(NotingRun(stop_at=3))


@pytest.mark.parametrize(
    ("stopped_at", "first", "saves", "told"),
    [
        (1, 0, [], "stopped before the first step, with nothing to save; continue with --resume"),
        (3, 0, [2], "stopped after step 2 of 6 with a good checkpoint"),
        (5, 0, [4], "stopped after step 4 of 6 with a good checkpoint"),
        (3, 2, [], "stopped after step 2 of 6 with a good checkpoint"),
    ],
)
def test_a_stop_while_a_batch_is_made_saves_the_step_before_once(stopped_at, first, saves, told):
    """That of step 4 is saved anyway, and that of the first step was restored."""
    run = NotingRun(first=first)
    taken = []

    def following(state):
        taken.append(state.step + 1)
        if taken[-1] == stopped_at:
            raise StoppedError

    run.feed.next = following
    with pytest.raises(Preempted, match=told):
        train(run)
    assert taken == list(range(first + 1, stopped_at + 1))
    assert [step for event, step in (e for e in run.events if isinstance(e, tuple)) if event == "save"] == saves
    assert run.events[-1] == "finish"


@pytest.mark.parametrize(("left_out", "ending"), [(False, None), (True, "stopped after step 6 of 6")])
def test_a_stop_during_the_last_evaluation_is_the_end_unless_it_left_that_out(left_out, ending):
    run = NotingRun()

    def evaluate(step, state):
        run.events.append(("evaluate", step))
        run._stop_at = 6 if step == 6 else None
        return not left_out or step < 6

    run.evaluate = evaluate
    with pytest.raises(Preempted, match=ending) if ending else contextlib.nullcontext():
        train(run)
    assert run.events[-4:] == [("evaluate", 6), "check", ("save", 6), "finish"]


def test_ctrl_c_says_what_is_saved_and_how_to_go_on(tmp_path):
    how = f"continue with --resume, or: python -m openpi_train resume {tmp_path}"
    assert str(interrupted(tmp_path)) == f"no step is saved yet; {how}"
    for step, files in ((20, ["manifest.json"]), (40, ["manifest.json"]), (60, [])):  # 60 is not complete
        (tmp_path / str(step)).mkdir()
        for file in files:
            (tmp_path / str(step) / file).write_text("{}")
    assert str(interrupted(tmp_path)) == f"the last saved step is 40; {how}"
