"""The progress line: what it says, and where."""

import io
import logging

import pytest
from rich.console import Console

from openpi_train.runtime.waiting import duration
from openpi_train.training.progress_report import ProgressReport


def ten_steps(report):
    for step in range(11, 21):
        report.advance(step, step_s=0.1 if step < 20 else 0.5)
    values = {"loss": 0.123456, "samples_per_s": 80.04, "grad_norm": 1.0, "time/step_s": 0.14, "data/wait_s": 0.07}
    return report.report(values)


def test_line_of_an_interval_says_everything_once(caplog):
    with caplog.at_level(logging.INFO):
        line = ten_steps(ProgressReport(100, start_step=10, console=Console(file=io.StringIO())))
    # 80 steps are left, 0.14 s each, of which 0.07 s wait for data.
    assert line == ("step 20/100 | loss 0.1235 | 80.0 samples/s | data wait 50% | step p50 100 ms p95 320 ms | ETA 11s")
    assert [record.getMessage() for record in caplog.records] == [line]


def test_second_interval_forgets_the_first():
    report = ProgressReport(100, console=Console(file=io.StringIO()))
    ten_steps(report)
    report.advance(21, step_s=1.0)
    assert "data wait 0% | step 1000 ms | ETA 1m19s" in report.report({"time/step_s": 1.0})
    assert "| acting 25% | data wait" in report.report({"time/step_s": 1.0, "time/acting_share": 0.25})


def test_a_run_on_own_rollouts_shows_its_reward_and_how_far_it_moves():
    values = {
        "loss": -0.0014,
        "rl/reward": 0.68125,
        "rl/reward_std": 0.2414,
        "rl/length_mean": 8.62,
        "samples_per_s": 9,
    }
    report = ProgressReport(40, console=Console(file=io.StringIO()))
    report.advance(16, step_s=1.0)
    line = report.report({**values, "approx_kl": 0.0412, "kl": 0.00321})
    start, end = "step 16/40 | loss -0.0014 | reward 0.6813 +- 0.24 | ", "length 8.6 | 9.0 samples/s"
    assert line == f"{start}approx_kl 0.041 | kl 0.0032 | {end}"
    # What a method does not measure, or could not, is left out.
    assert report.report({**values, "approx_kl": None}) == f"{start}{end}"
    # Other methods have a kl, too, which is none of a policy.
    assert report.report({"loss": 1.0, "kl": 3.0}) == "step 16/40 | loss 1.0000"


def test_terminal_shows_a_bar_and_logs_no_line(caplog):
    screen = io.StringIO()
    with caplog.at_level(logging.INFO):
        report = ProgressReport(100, console=Console(file=screen, force_terminal=True, width=160))
        ten_steps(report)
        report.close()
    assert "20/100" in screen.getvalue()
    assert "loss 0.1235" in screen.getvalue()
    assert not caplog.records


def test_other_processes_show_nothing(caplog):
    screen = io.StringIO()
    with caplog.at_level(logging.INFO):
        report = ProgressReport(100, process_index=1, console=Console(file=screen, force_terminal=True))
        ten_steps(report)
        report.close()
    assert screen.getvalue() == ""
    assert not caplog.records


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0s"), (42, "42s"), (200, "3m20s"), (7500, "2h05m"), (273_600, "3d04h")]
)
def test_duration_for_people(seconds, text):
    assert duration(seconds) == text
