"""The small PaliGemma with a flow head on made-up data; `test_paligemma_run.py` trains it."""

import dataclasses

from openpi_train import registry
from openpi_train.data.make.fake import FakeData
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.robots.bridge import Bridge

_DATA = DataConfig(
    datasets=(Dataset(source=FakeData(image_height=64, image_width=64), robot=Bridge(), asset_id="fake"),),
    tokenizer="bytes",
    text_lengths=1,
)
_tiny = registry.load("paligemma_tiny")
flow = dataclasses.replace(_tiny, data=_DATA, model=dataclasses.replace(_tiny.model, max_token_len=32))
"""On one device or several."""
