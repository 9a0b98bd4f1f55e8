"""Video datasets of both LeRobot formats in one mixture; `test_lerobot_run.py` trains on them."""

import dataclasses
from pathlib import Path

from tiny_policies import seeing

from openpi_train.data.formats.lerobot import LeRobot
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.optim import LRSchedule
from openpi_train.robots.bridge import Bridge

FIXTURES = Path(__file__).resolve().parents[1] / "data" / "formats" / "lerobot" / "fixtures"

robot = Bridge(cameras={"base_0_rgb": "observation/images/front"})
datasets = tuple(Dataset(source=LeRobot(path=str(FIXTURES / name)), robot=robot) for name in ("v21_video", "v30_video"))
both = dataclasses.replace(
    seeing,
    data=DataConfig(datasets=datasets, validation_fraction=0.0),
    lr_schedule=LRSchedule(warmup_steps=0, peak_lr=1e-2, decay_steps=20, decay_lr=1e-2),
    num_train_steps=20,
    save_interval=20,
)
"""Both."""
