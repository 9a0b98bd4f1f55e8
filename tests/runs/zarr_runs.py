"""Two experiments of which the action dims of a zarr store choose one; `test_zarr_run.py` trains on stores."""

import dataclasses

from tiny_policies import seeing

from openpi_train.choice import ByActionDim
from openpi_train.data.formats.zarr import Zarr
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.robots.robotwin import RoboTwin


def on(dims):
    dataset = Dataset(source=Zarr(path="nowhere.zarr"), robot=RoboTwin(dims=dims), prompt="stack the bowls")
    return dataclasses.replace(
        seeing,
        model=dataclasses.replace(seeing.model, action_dim=dims, cameras=("head_camera",)),
        data=DataConfig(datasets=(dataset,), validation_fraction=0.0),
        num_train_steps=2,
    )


arms_14, arms_16 = on(14), on(16)
arms = ByActionDim(experiments={14: arms_14, 16: arms_16})
"""Two arms."""
