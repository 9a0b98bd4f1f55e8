"""Looks at a run's datasets without reading them at length, for a dry run. Read next: `opened.py`, which opens them."""

import importlib.util

import numpy as np

from openpi_train.data.core import hub
from openpi_train.data.core.dataset_flags import of_dataset
from openpi_train.data.core.interface import OpeningRequest
from openpi_train.data.make import embedded
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.data.robot.norm_stats import assets
from openpi_train.data.robot.normalize import read_norm_stats
from openpi_train.data.robot.opened import open_windows
from openpi_train.data.robot.row_format import RowModel
from openpi_train.data.robot.tokens import open_tokenizer
from openpi_train.data.robot.windows import Windows, WindowShape
from openpi_train.runtime.exits import DataError, ErrorCollector, reported_as


def examine(config: DataConfig, shape: WindowShape) -> list[str]:
    """Raise what opening the datasets would, and return a sentence for each that cannot be looked at yet.

    Nothing is written. Of a dataset without an index only the columns' shapes are compared with the robot's, if its
    metadata have them. Raises DataError, for all datasets.
    """
    together, found = ErrorCollector(), []
    for number, dataset in enumerate(config.datasets):
        with together, reported_as(DataError), of_dataset(number):
            found.append(_examine(dataset, config, shape))
    together.raise_all()
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
            skip_unlabeled=dataset.skip_unlabeled,
            only=dataset.only,
        )
        _ = windows.steps  # reads the columns as the robot does
        return ""
    if source.shapes_in_metadata:
        columns = {name: np.zeros((1, *dims), np.float32) for name, dims in source.column_shapes().items()}
        dataset.robot.read(columns, np.array([1]))
    return (
        f"{source.location}: not indexed yet; a start reads all of it, and `data index {source.location}` does so now"
    )


def is_ready(config: DataConfig, request: OpeningRequest) -> bool:
    """Whether opening the data for a run only reads what was made before: datasets, indexes, norm stats, tokenizer.

    False for a model that counts the tokens of chunks, which takes long at first. Raises as opening does.
    """
    skip = config.on_bad_record == "skip"
    sources = [dataset.source.skipping_bad_records() if skip else dataset.source for dataset in config.datasets]
    if not all(not embedded.missing(source.location) and source.is_ready() for source in sources):
        return False
    found = assets(config, open_windows(config, request.model.rows.window), request.assets_dir)
    tokenizer = open_tokenizer(request.model, config.tokenizer, offline=True)
    return all(asset.known() for asset in found) and request.model.rows.chunk_tokenizer(tokenizer) is None


def examine_files(config: DataConfig, model: RowModel) -> list[str]:
    """Raise what reading given norm stats and the tokenizer would, and say if the tokenizer is still on the hub.

    Raises UsageError or DataError, for all of them.
    """
    together, notes = ErrorCollector(), []
    for dataset in config.datasets:
        with together, reported_as(DataError):
            if dataset.norm_stats is not None:
                read_norm_stats(dataset.norm_stats)
    with together, reported_as(DataError):
        notes = _examine_tokenizer(config, model)
    together.raise_all()
    return notes


def _examine_tokenizer(config: DataConfig, model: RowModel) -> list[str]:
    if any(embedded.missing(dataset.source.location) for dataset in config.datasets):
        return []  # its tokenizer is written with it
    name = config.tokenizer
    try:
        open_tokenizer(model, name, offline=True)
    except (FileNotFoundError, DataError):
        on_hub = name.startswith(hub.SCHEME) or (hub.may_be_repository(name) and not name.endswith(".model"))
        if not on_hub or config.offline or hub.is_offline() or importlib.util.find_spec("huggingface_hub") is None:
            raise
        return [f"tokenizer {name}: it is not on this machine; a start fetches it from the hub"]
    return []
