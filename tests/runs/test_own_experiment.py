"""An experiment that is no robot's goes through all that a run has, without a change to the package."""

import json
import shutil

import pytest
from runs.command import ROOT, check, losses, openpi_train, places, train

pytestmark = pytest.mark.multiprocess
OWN, HARD = (f"{ROOT}/tests/runs/{name}" for name in ("own_experiment.py:own", "own_feed.py:hard"))


def lines(base, name):
    return [json.loads(line) for line in (base / "runs" / name / "x" / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Both experiments, each on two processes of two devices."""
    base = tmp_path_factory.mktemp("own")
    for experiment in (OWN, HARD):
        train(base, experiment, processes=2, devices=2)
    return base


def continued(base, tmp_path, name, experiment, lost):
    """The losses of a copy that lost its last checkpoints, and went on from those before."""
    shutil.copytree(base / "runs", tmp_path / "runs")
    for step in lost:
        shutil.rmtree(tmp_path / "runs" / name / "x" / str(step))
    done = train(tmp_path, experiment, "--resume", processes=2, devices=2)
    return done.stdout, losses(tmp_path, name)


def test_it_fits_in_a_file():
    assert (ROOT / "tests" / "runs" / "own_experiment.py").read_text().count("\n") < 120


def test_it_learns_and_is_measured_alike_on_one_device(base, tmp_path):
    train(tmp_path, OWN, "--sharding.strategy", "replicated", "--grad-accum", "1")
    found, alone = (losses(folder, "own") for folder in (base, tmp_path))
    assert list(found) == list(range(1, 9))
    assert found == pytest.approx(alone, rel=1e-5)
    measured, measured_alone = (
        [line for line in lines(folder, "own") if "val/accuracy" in line] for folder in (base, tmp_path)
    )
    assert [line["step"] for line in measured] == [0, 4, 8]
    for line, other in zip(measured, measured_alone, strict=True):
        assert line["val/accuracy"] == other["val/accuracy"] and line["val/accuracy"] * 50 % 1 < 1e-9
        assert line["val/loss"] == pytest.approx(other["val/loss"], rel=1e-5)
    assert measured[-1]["val/loss"] < 0.9 * measured[0]["val/loss"]
    assert measured[-1]["val/accuracy"] > measured[0]["val/accuracy"]


def test_it_goes_on_bit_for_bit(base, tmp_path):
    output, found = continued(base, tmp_path, "own", OWN, [8])
    assert "continuing from step 4 of 8" in output and found == losses(base, "own")


def test_a_feed_that_acts_is_saved_where_it_asks_the_parameters_anew_and_goes_on_bit_for_bit(base, tmp_path):
    run = base / "runs" / "hard" / "x"
    # Saves are due at 4 and 8; the last step is saved in any case.
    assert sorted(int(path.parent.name) for path in run.glob("[0-9]*/manifest.json")) == [6, 9, 10]
    output, found = continued(base, tmp_path, "hard", HARD, [9, 10])
    assert "continuing from step 6 of 10" in output and found == losses(base, "hard")


def test_plan_and_report_show_it(base, tmp_path):
    done = openpi_train("plan", OWN, "--devices", "4", "--device-kind", "h200", "--no-compile")
    assert "zero3" in check(done, 0, "parameters")
    page = tmp_path / "report.html"
    check(openpi_train("report", base / "runs" / "own" / "x", "--experiment", OWN, "--out", page), 0)
    text = page.read_text()
    assert ">accuracy</td>" in text or "<figcaption>accuracy" in text
    assert "no sample batch" in text


def test_what_is_for_robots_says_so(base):
    run = base / "runs" / "own" / "x"
    check(openpi_train("eval", run, "--experiment", OWN), 2, "robot")
    check(openpi_train("stats", OWN, *places(base)), 2, "robots' demonstrations")
