"""The experiment of `make gpu`'s run: full-size pi0 with low-rank adapters on made-up data, from random weights."""

import dataclasses

from openpi_train_configs.debug import debug
from openpi_train_configs.pi0_bridge import pi0_bridge_traj_lora

from openpi_train.data.make.fake import FakeData
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.experiment import EvalConfig
from openpi_train.robots.bridge import Bridge

full_size = dataclasses.replace(
    pi0_bridge_traj_lora,
    data=DataConfig(
        datasets=(Dataset(source=FakeData(image_height=256, image_width=256), robot=Bridge(), asset_id="fake"),),
        tokenizer="bytes",
        text_lengths=1,
    ),
    num_train_steps=60,
    log_interval=5,
    save_interval=30,
    eval=EvalConfig(interval=0, num_rows=debug.batch_size * 4),
)
"""Everything that a run does between its first line and its last, at full size: reading, training, evaluating, saving.

Command: python -m openpi_train benchmarks/full_size.py:full_size --exp-name x --profile 3
Hardware: one 80 GB GPU. Time: minutes. Result: none; the data are noise.
"""
