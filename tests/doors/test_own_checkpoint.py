"""Paths of other tools that name a checkpoint of a run."""

from pathlib import Path

import pytest

from openpi_train.doors.own_checkpoint import going_on, own_checkpoint, split_checkpoint


@pytest.mark.parametrize(
    ("path", "run", "point"),
    [
        ("o/run/500", "o/run", "500"),
        ("o/run/checkpoint-500", "o/run", "500"),
        ("o/run/checkpoints/latest", "o/run", "latest"),
        ("o/run/best", "o/run", "best"),
        ("o/run/", "o/run", "latest"),
        # A run may be called like a step.
        ("o/500", "o/500", "latest"),
        ("o/500/7", "o/500", "7"),
        ("o/run/500/params", "o/run", None),
        ("o/other/500", "o/run", None),
    ],
)
def test_a_path_names_a_runs_checkpoint(path, run, point):
    assert own_checkpoint(path, [Path(run).absolute()]) == point


def test_a_path_is_a_folder_and_a_checkpoint():
    assert split_checkpoint("o/run") == (Path("o/run").absolute(), None)
    assert split_checkpoint("o/run/model_best.pth.tar") == (Path("o/run").absolute(), "best")


def test_a_run_that_starts_again_goes_on_from_its_newest_checkpoint():
    words = ["--seed", "3", "--resume-from", "500", "--batch-size", "4"]
    assert going_on(words, ["--batch-size", "8"]) == words
    assert going_on(words, ["--resume"]) == ["--seed", "3", "--batch-size", "4"]
    # Another run's: a run begins there once only.
    other = ["--resume-from", "elsewhere/500"]
    assert going_on(other, ["--resume"]) == other
