"""Two robots' datasets, one with records that cannot be read; `test_mixture_run.py` trains on them."""

import dataclasses

from tiny_policies import seeing

from openpi_train.data.make.fake import FakeData
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.robots.bridge import Bridge

SIZE = {"image_height": 32, "image_width": 32}
data = DataConfig(
    datasets=(
        Dataset(source=FakeData(**SIZE, bad_steps=tuple(range(60))), robot=Bridge(), asset_id="torn", weight=3),
        Dataset(source=FakeData(**SIZE, seed=1), robot=Bridge(), asset_id="sound"),
    ),
    on_bad_record="skip",
    validation_fraction=0,
)
mixed = dataclasses.replace(seeing, data=data, num_train_steps=4)
"""Three quarters of the rows are the torn one's."""
