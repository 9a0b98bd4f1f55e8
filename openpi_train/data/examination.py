"""Looks at a run's datasets without reading them at length, for a dry run. Read next: `opened.py`, which opens them."""

import numpy as np

from openpi_train.data import embedded
from openpi_train.data.config import DataConfig, Dataset
from openpi_train.data.windows import Windows, WindowShape


def examine(config: DataConfig, shape: WindowShape) -> list[str]:
    """Raise what opening the datasets would, and return a sentence for each that cannot be looked at yet.

    Nothing is written. Of a dataset without an index only the columns' shapes are compared with the robot's, if its
    metadata have them. Raises FileNotFoundError or ValueError.
    """
    found = [_examine(dataset, config, shape) for dataset in config.datasets]
    return [sentence for sentence in found if sentence]


def _examine(dataset: Dataset, config: DataConfig, shape: WindowShape) -> str:
    source = dataset.source
    if embedded.missing(source.location):
        return f"{source.location}: the embedded dataset is not written yet; a start does it"
    if source.is_ready():
        windows = Windows(
            source=source.open(),
            robot=dataset.robot,
            shape=shape,
            validation_fraction=config.validation_fraction if dataset.validation is None else 0.0,
            prompt=dataset.prompt,
        )
        _ = windows.steps  # reads the columns as the robot does
        return ""
    if source.shapes_in_metadata:
        columns = {name: np.zeros((1, *dims), np.float32) for name, dims in source.column_shapes().items()}
        dataset.robot.read(columns, np.array([1]))
    return (
        f"{source.location}: not indexed yet; a start reads all of it, and `data index {source.location}` does so now"
    )
