"""Detection of a dataset's format on disk. A new format needs a `SourceConfig` (`core/source.py`) and a branch here.

Read next: `core/source.py`, then the `..._index.py` of `rlds/`, `lerobot/`, `zarr/` and `parquet/`.
"""

import logging
from pathlib import Path

from openpi_train.data.core import cache_folders
from openpi_train.data.core.close_names import guess
from openpi_train.data.core.source import SourceConfig
from openpi_train.data.formats.lerobot import LeRobot
from openpi_train.data.formats.lerobot.lerobot_layout import is_lerobot
from openpi_train.data.formats.parquet import Parquet
from openpi_train.data.formats.parquet.parquet_index import parquet_files
from openpi_train.data.formats.repack import is_repacked
from openpi_train.data.formats.rlds import Rlds
from openpi_train.data.formats.rlds.schema import find_version
from openpi_train.data.formats.zarr import Zarr
from openpi_train.data.formats.zarr.store import is_zarr

logger = logging.getLogger(__name__)


def source_at(path: str) -> SourceConfig:
    """The source config for the dataset at `path`, from its metadata; of a name that is no path, for the LeRobot
    dataset of this name where LeRobot downloads to. Raises FileNotFoundError if there is none."""
    if "://" not in path and not Path(path).expanduser().exists():
        # A path that begins so is no name on the hub.
        downloaded = None if path.startswith(("/", "~", ".")) else cache_folders.lerobot(path)
        if downloaded is not None and is_lerobot(downloaded):
            logger.info("%s is read from LeRobot's folder: %s", path, downloaded)
            return LeRobot(path=downloaded)
        where = "" if downloaded is None else f"; nor is {downloaded}, where LeRobot would have it (--data.repo-id)"
        raise FileNotFoundError(
            f"{path} does not exist{guess(Path(path).expanduser())}: give the folder of an RLDS dataset (with "
            "dataset_info.json), of a LeRobot one (with meta/info.json), a zarr store, or a folder of parquet files"
            f"{where}{guess(Path(downloaded)) if downloaded else ''}"
        )
    if is_lerobot(path):
        return LeRobot(path=path)
    if is_zarr(path):
        return Zarr(path=path)
    if parquet_files(path):
        return Parquet(path=path)
    if not is_repacked(path):
        try:
            find_version(path)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{path} holds no LeRobot dataset (meta/info.json), no zarr store (.zgroup or zarr.json), and {error}"
            ) from error
    return Rlds(path=path)
