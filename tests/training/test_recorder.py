"""What a metrics line says of its steps and their time; one that is begun before a checkpoint and written after it."""

import json

import jax
import numpy as np
import pytest

from openpi_train.runtime.exits import NumbersError
from openpi_train.training.program import Program
from openpi_train.training.recorder import Recorder

LOSSES = np.random.default_rng(0).normal(size=31).astype(np.float32)


def make_recorder(unread=None, stop_on_nan=True):
    return Recorder(
        batch_size=8,
        peak_flops=None,
        counted_s={"data": lambda: 0.0},
        row_names=lambda step: ["row"],
        stop_on_nan=stop_on_nan,
        unread=unread,
    )


def take(recorder, first, last, skipped=(), interval=5):
    """The lines of the steps, without times."""
    lines = {}
    for step in range(first, last + 1):
        loss = np.float32("nan") if step in skipped else LOSSES[step]
        metrics = {"loss": loss, "grad_norm": loss * loss, "skipped": np.float32(step in skipped)}
        metrics["tokens"] = np.float32(7 * step)
        recorder.add(step, metrics)
        if step % interval == 0:
            line = recorder.read()
            lines[step] = {
                name: line[name] for name in ("loss", "grad_norm", "skipped_steps", "tokens") if name in line
            }
    return lines


@pytest.mark.parametrize("saved", [20, 21, 24, 25])
@pytest.mark.parametrize("skipped", [(), (3, 22, 24, 27), (21, 22, 23, 24, 25)])
def test_a_resumed_run_writes_the_lines_of_an_undisturbed_one(saved, skipped):
    undisturbed = take(make_recorder(stop_on_nan=False), 1, 30, skipped)
    first = make_recorder(stop_on_nan=False)
    lines = take(first, 1, saved, skipped)
    unread = json.loads(json.dumps(first.unread(), allow_nan=False))
    assert lines | take(make_recorder(unread, stop_on_nan=False), saved + 1, 30, skipped) == undisturbed
    assert lines | take(first, saved + 1, 30, skipped) == undisturbed, "to be asked changes nothing"


def test_tokens_are_counted_from_the_first_step_or_not_at_all():
    assert {step: line["tokens"] for step, line in take(make_recorder(), 1, 10).items()} == {5: 7 * 15, 10: 7 * 55}
    of_an_older_version = {"steps": [], "skipped_steps": 0}
    resumed = make_recorder(of_an_older_version)
    assert "tokens" not in take(resumed, 1, 5)[5] and "tokens" not in resumed.unread()


def test_two_resumes_within_one_line_keep_all_of_it():
    recorder = make_recorder()
    lines = take(recorder, 1, 21)
    for step in (22, 23):
        recorder = make_recorder(recorder.unread())
        lines |= take(recorder, step, step)
    recorder = make_recorder(make_recorder(recorder.unread()).unread())  # saved again before the first step
    assert lines | take(recorder, 24, 30) == take(make_recorder(), 1, 30)


def test_a_step_that_was_skipped_before_the_resume_stops_no_run_after_it():
    before = make_recorder(stop_on_nan=False)
    take(before, 1, 3, skipped=(2,))
    resumed = make_recorder(before.unread())
    resumed.check()
    assert take(resumed, 4, 5)[5]["skipped_steps"] == 1
    with pytest.raises(NumbersError, match="step 6"):
        take(resumed, 6, 10, skipped=(6,))


def test_an_interval_in_which_every_gradient_overflowed_is_warned_of(caplog):
    recorder = make_recorder()
    for step, overflow in ((1, 1), (2, 1)):
        recorder.add(step, {"loss": np.float32(1), "skipped": np.float32(1), "overflow": np.float32(overflow)})
    recorder.read()
    assert "no update was applied in the last 2 steps" in caplog.text
    caplog.clear()
    for step, overflow in ((3, 1), (4, 0)):
        recorder.add(step, {"loss": np.float32(1), "skipped": np.float32(overflow), "overflow": np.float32(overflow)})
    recorder.read()
    assert not caplog.text


def test_a_number_that_is_not_finite_can_be_saved():
    recorder = make_recorder()
    recorder.add(1, {"loss": np.float32(1), "param_norm": np.float32("inf"), "skipped": np.float32(0)})
    unread = json.loads(json.dumps(recorder.unread(), allow_nan=False))
    assert make_recorder(unread).unread() == unread
    resumed = make_recorder(unread)
    resumed.add(2, {"loss": np.float32(3), "param_norm": np.float32(2), "skipped": np.float32(0)})
    line = resumed.read()
    assert (line["loss"], line["param_norm"]) == (2.0, float("inf"))


class Clock:
    """A clock that stands still until it is told to move; `data_s` and `acting_s` are times spent on those."""

    def __init__(self):
        self.now = self.data_s = self.acting_s = 0.0

    def __call__(self):
        return self.now

    def move(self, seconds):
        self.now += seconds

    def act(self, seconds):
        self.acting_s += seconds
        self.move(seconds)

    def wait_for_data(self, seconds):
        self.data_s += seconds
        self.move(seconds)


def test_every_second_of_an_interval_belongs_to_one_part(monkeypatch):
    clock = Clock()
    clock.data_s = 100.0  # of before: not ours
    recorder = Recorder(
        batch_size=8,
        peak_flops=1e12,
        counted_s={"data": lambda: clock.data_s, "acting": lambda: clock.acting_s},
        row_names=str,
        stop_on_nan=True,
        clock=clock,
    )
    monkeypatch.setattr(jax, "block_until_ready", lambda x: clock.move(4.0))
    device_get = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda x: (clock.move(1.0), device_get(x))[1])
    clock.move(1000.0)
    clock.act(50.0)
    recorder.begin()
    clock.act(6.0)
    # Two programs take turns: rates are of what was computed.
    programs = [
        Program(model_flops=flops, executed_flops=2e11 + flops, sent_bytes={}, compile_s=1.0) for flops in (5e11, 7e11)
    ]
    for step in range(1, 5):  # the host waits for the devices at the third and the fourth
        clock.wait_for_data(0.5)
        clock.move(0.25)
        metrics = {"loss": np.float32(1), "skipped": np.float32(0), "tokens": np.float32(100 * step)}
        recorder.add(step, metrics, programs[step % 2])
    with recorder.paused("evaluation"):
        clock.move(7.0)
    with recorder.paused("checkpoint"):
        clock.move(3.0)
    line = recorder.read()
    seconds = {"data": 2.0, "acting": 6.0, "device": 9.0, "host": 1.0, "evaluation": 7.0, "checkpoint": 3.0}
    assert line["time/interval_s"] == 28.0
    assert {part: line[f"time/{part}_share"] * 28.0 for part in seconds} == pytest.approx(seconds)
    assert sum(value for name, value in line.items() if name.endswith("_share")) == pytest.approx(1.0)
    assert (line["time/step_s"], line["data/wait_s"]) == (4.5, 0.5)
    assert (line["samples_per_s"], line["tokens_per_s"]) == pytest.approx((8 / 4.5, 1000 / 18))
    assert (line["mfu"], line["hfu"]) == pytest.approx((2.4 / 18, 3.2 / 18))
    assert line["tokens"] == 1000

    clock.move(0.5)  # the next interval begins where the last one ended
    recorder.add(5, {"loss": np.float32(1), "skipped": np.float32(0)})
    line = recorder.read()
    assert (line["time/interval_s"], line["time/host_share"], line["time/device_share"]) == (1.5, 1 / 3, 2 / 3)
    assert recorder.last_step_s() == 0.0


def test_without_a_known_peak_the_share_of_it_is_unknown():
    recorder = make_recorder()
    recorder.begin()
    program = Program(model_flops=6e11, executed_flops=8e11, sent_bytes=None, compile_s=1.0)
    recorder.add(1, {"loss": np.float32(1), "skipped": np.float32(0)}, program)
    line = recorder.read()
    assert (line["mfu"], line["hfu"]) == (None, None)
