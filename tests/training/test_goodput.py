"""Where a run's wall time goes over several starts, against hand-made sums."""

import json

import pytest

from openpi_train.runtime import phases
from openpi_train.training import goodput
from openpi_train.training.goodput import Goodput


class Start:
    """A start of the run in `directory` that began at `began` and has been in these phases since."""

    def __init__(self, directory, began, step, **spent):
        self.began, self.spent, self.waited = began, dict(spent), 0.0
        self.account = Goodput(
            directory, step=step, waited_s=lambda: self.waited, spent_s=lambda: self.spent, clock=self.now
        )

    def now(self):
        return self.began + sum(self.spent.values())

    def spend(self, step, **spent):
        for name, seconds in spent.items():
            self.spent[name] = self.spent.get(name, 0.0) + seconds
        self.account.write(step)


def spent(**parts):
    return dict.fromkeys(goodput.PARTS, 0.0) | parts


def test_every_second_of_a_start_belongs_to_one_part(tmp_path):
    start = Start(tmp_path, 1000.0, 0, starting=7.0, **{"making the state": 3.0})
    start.waited = 4.0
    start.spend(10, **{"compiling the training step": 30.0}, training=54.0, evaluating=5.0, saving=1.0)
    expected = spent(start=10.0, compile=30.0, training=50.0, data=4.0, evaluate=5.0, save=1.0)
    assert goodput.read_account(tmp_path) == expected
    assert start.account.metrics() == {"time/goodput": 0.5}
    assert start.account.words() == (
        "goodput 50% of 1m40s: training 50s, data 4s, evaluate 5s, save 1s, start 10s, compile 30s"
    )


def test_what_was_trained_after_the_last_save_is_lost_and_the_gap_is_down_time(tmp_path):
    first = Start(tmp_path, 1000.0, 0, starting=10.0)
    first.spend(50, training=100.0, saving=2.0)
    first.spend(70, training=40.0, evaluating=8.0)  # then it is killed
    second = Start(tmp_path, 1200.0, 50, starting=20.0)
    assert goodput.read_account(tmp_path) == spent(training=100.0, save=2.0, lost=48.0, start=30.0, down=40.0)
    second.spend(60, training=10.0)  # killed again, before a save
    third = Start(tmp_path, 1235.0, 50, starting=20.0)
    third.spend(100, training=100.0)
    expected = spent(training=200.0, save=2.0, lost=58.0, start=50.0, down=45.0)
    assert goodput.read_account(tmp_path) == expected
    assert sum(expected.values()) == third.now() - 1000.0


def test_the_time_between_the_end_of_a_run_and_its_extension_is_no_down_time(tmp_path):
    first = Start(tmp_path, 1000.0, 0, starting=10.0)
    first.spend(50, training=90.0)
    first.account.write(50, is_end=True)
    second = Start(tmp_path, 9000.0, 50, starting=20.0)
    second.spend(60, training=30.0)  # and then it is killed
    assert goodput.read_account(tmp_path) == spent(training=120.0, start=30.0)
    Start(tmp_path, 9100.0, 60, starting=1.0)
    assert goodput.read_account(tmp_path) == spent(training=120.0, start=31.0, down=50.0)


def test_a_start_from_an_older_checkpoint_loses_what_came_after_it(tmp_path):
    first = Start(tmp_path, 0.0, 0)
    for step in (10, 20, 30):
        first.spend(step, training=10.0)
    Start(tmp_path, 30.0, 30).spend(40, training=10.0)
    Start(tmp_path, 40.0, 10)  # the checkpoints of 20 and 30 are damaged
    assert goodput.read_account(tmp_path) == spent(training=10.0, lost=30.0)


def test_a_torn_line_and_a_run_without_an_account_are_no_errors(tmp_path):
    assert goodput.read_account(tmp_path) is None and goodput.read_longest(tmp_path) == {}
    Start(tmp_path, 0.0, 0).spend(10, training=10.0)
    with (tmp_path / goodput.NAME).open("a") as file:
        file.write('{"at": 12.0, "step": 11, "sec')
    assert goodput.read_account(tmp_path) == spent(training=10.0)
    Start(tmp_path, 10.0, 10)
    assert json.loads((tmp_path / goodput.NAME).read_text().splitlines()[-1])["step"] == 10


def test_a_line_between_saves_comes_every_five_minutes_and_only_the_end_is_read(tmp_path, monkeypatch):
    start = Start(tmp_path, 0.0, 0)
    for step in range(1, 1001):
        start.spent["training"] = 3.0 * step
        start.account.write(step, if_due=True)
    assert sum(start.account.totals().values()) == 3000.0
    lines = [json.loads(line) for line in (tmp_path / goodput.NAME).read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(0, 1001, 100))
    seen = []
    real = goodput.lines_from_the_end
    monkeypatch.setattr(goodput, "lines_from_the_end", lambda path: (seen.append(one) or one for one in real(path)))
    Start(tmp_path, 3000.0, 900)
    assert len(seen) == 2


def test_the_longest_times_are_kept_for_the_next_start(tmp_path):
    phases.expect({"evaluating": 12.5})
    Start(tmp_path, 0.0, 0)
    assert goodput.read_longest(tmp_path) == pytest.approx({"evaluating": 12.5})
