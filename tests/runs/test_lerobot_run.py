"""Runs on genuine LeRobot video datasets: one named on the command line, and both formats mixed, on two processes."""

from pathlib import Path

import numpy as np
import pytest
from command import check, losses, openpi_train, train

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
FIXTURES = Path(__file__).resolve().parents[1] / "data" / "lerobot" / "fixtures"
CAMERA = ("--data.datasets.0.robot.cameras.base-0-rgb", "observation/images/front")
EXPERIMENT = f"""
import dataclasses
from openpi_train.data.config import DataConfig, Dataset
from openpi_train.data.lerobot import LeRobot
from openpi_train.robots.bridge import Bridge
from openpi_train_configs.debug import debug

robot = Bridge(cameras={{"base_0_rgb": "observation/images/front"}})
datasets = tuple(
    Dataset(source=LeRobot(path=path), robot=robot)
    for path in ("{FIXTURES / "v21_video"}", "{FIXTURES / "v30_video"}")
)
both = dataclasses.replace(
    debug, data=DataConfig(datasets=datasets, tokenizer="bytes"), num_train_steps=20, save_interval=20, batch_size=4
)
"""


def test_the_debug_model_trains_on_a_lerobot_dataset_named_on_the_command_line(tmp_path):
    home = {"OPENPI_TRAIN_HOME": str(tmp_path / "home")}
    flags = ("--dataset", FIXTURES / "v30_video", *CAMERA, "--num-workers", "1", "--num-train-steps", "2")
    train(tmp_path, "debug", *flags, **home)
    assert set(losses(tmp_path)) == {1, 2}
    assert (tmp_path / "assets" / "debug" / "v30_video" / "norm_stats.json").is_file()


def test_both_formats_train_together_on_two_processes(tmp_path):
    (tmp_path / "lerobot_experiments.py").write_text(EXPERIMENT)
    name = f"{tmp_path}/lerobot_experiments.py:both"
    train(tmp_path, name, "--num-workers", "1", processes=2, OPENPI_TRAIN_HOME=str(tmp_path / "home"))
    found = losses(tmp_path, "both")
    assert set(found) == set(range(1, 21)) and np.isfinite([*found.values()]).all()
    first, last = ([found[step] for step in steps] for steps in (range(1, 6), range(16, 21)))
    assert np.mean(last) < np.mean(first)
    for dataset in ("v21_video", "v30_video"):
        assert (tmp_path / "assets" / "both" / dataset / "norm_stats.json").is_file()


def test_a_dataset_of_no_known_format_ends_the_run_with_the_code_for_data(tmp_path):
    done = openpi_train("debug", "--exp-name", "x", "--dataset", tmp_path)
    check(done, 3, "holds no LeRobot dataset", "holds no RLDS dataset")
