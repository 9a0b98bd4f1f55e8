"""The loop's order of things, with a run that only takes notes."""

import contextlib
import inspect
import types

import pytest

from openpi_train.runtime.exits import Preempted
from openpi_train.training import loop

train = inspect.unwrap(loop.train)  # without the run-time type check: it is given no real run


class NotingRun:
    """Stands for `Run`; the state is its step. `stop_at`: the step at which the processes agree to stop."""

    def __init__(self, first=0, total=6, stop_at=None):
        self.events, self._stop_at = [], stop_at
        self.state = types.SimpleNamespace(step=first)
        self.experiment = types.SimpleNamespace(
            num_train_steps=total, log_interval=2, save_interval=4, eval=types.SimpleNamespace(interval=3)
        )
        self.recorder = types.SimpleNamespace(
            read=dict, check=lambda: self.events.append("check"), paused=contextlib.nullcontext
        )
        self.feed = types.SimpleNamespace(next=lambda state: None)

    def compile_step(self, state):
        return lambda state, batch: (types.SimpleNamespace(step=state.step + 1), {})

    def note(self, step, metrics):
        pass

    def stop_requested(self, step):
        return step == self._stop_at

    def finish(self):
        self.events.append("finish")

    def __getattr__(self, name):
        def noted(step, *_):
            self.events.append((name, step))

        return noted


def test_everything_happens_at_its_interval_and_at_the_end():
    run = NotingRun()
    assert train(run).step == 6
    assert run.events == [
        *[("evaluate", 0), ("log", 2), ("evaluate", 3), ("log", 4), "check", ("save", 4)],
        *[("log", 6), ("evaluate", 6), "check", ("save", 6), "finish"],
    ]


def test_a_stop_saves_without_evaluating_and_says_how_to_go_on():
    run = NotingRun(stop_at=3)
    with pytest.raises(Preempted, match="stopped after step 3 of 6 with a good checkpoint; continue with --resume"):
        train(run)
    assert run.events[-4:] == [("evaluate", 3), "check", ("save", 3), "finish"]


def test_a_stop_at_the_last_step_is_the_end():
    run = NotingRun(stop_at=6)
    assert train(run).step == 6
    assert run.events[-1] == "finish"


def test_a_resumed_run_evaluates_no_second_time_at_its_start():
    run = NotingRun(first=4)
    train(run)
    assert run.events[0] == ("log", 6)
