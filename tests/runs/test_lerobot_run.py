"""Runs on genuine LeRobot video datasets: one named on the command line, and both formats mixed, on two processes."""

from pathlib import Path

import numpy as np
import pytest
from command import check, losses, openpi_train, train

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
FIXTURES = Path(__file__).resolve().parents[1] / "data" / "formats" / "lerobot" / "fixtures"
CAMERA = ("--data.datasets.0.robot.cameras.base-0-rgb", "observation/images/front")
RUNS = Path(__file__).with_name("lerobot_runs.py")


def test_a_model_trains_on_a_lerobot_dataset_named_on_the_command_line(tmp_path):
    home = {"OPENPI_TRAIN_HOME": str(tmp_path / "home")}
    flags = ("--dataset", FIXTURES / "v30_video", *CAMERA, "--num-workers", "1", "--num-train-steps", "2")
    flags += ("--data.validation-fraction", "0")
    train(tmp_path, f"{Path(__file__).with_name('tiny_policies.py')}:seeing", *flags, **home)
    assert set(losses(tmp_path, "seeing")) == {1, 2}
    assert (tmp_path / "assets" / "seeing" / "v30_video" / "norm_stats.json").is_file()


def test_both_formats_train_together_on_two_processes(tmp_path):
    train(tmp_path, f"{RUNS}:both", "--num-workers", "1", processes=2, OPENPI_TRAIN_HOME=str(tmp_path / "home"))
    found = losses(tmp_path, "both")
    assert set(found) == set(range(1, 21)) and np.isfinite([*found.values()]).all()
    first, last = ([found[step] for step in steps] for steps in (range(1, 6), range(16, 21)))
    assert np.mean(last) < np.mean(first)
    for dataset in ("v21_video", "v30_video"):
        assert (tmp_path / "assets" / "both" / dataset / "norm_stats.json").is_file()


def test_a_dataset_of_no_known_format_ends_the_run_with_the_code_for_data(tmp_path):
    done = openpi_train("debug", "--exp-name", "x", "--dataset", tmp_path)
    check(done, 3, "holds no LeRobot dataset", "holds no RLDS dataset")
