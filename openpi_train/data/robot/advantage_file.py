"""A dataset's advantages, in a file of their own beside it: the dataset is not changed.

A parquet file with a row per control step, in the dataset's order; LeRobot's users join it by `index`:

    index, episode_index, frame_index    int64, the step's number in the dataset, its episode, its number in that
    return                               float32, of the stored episode from this step on, in [-1, 0]
    value                                float32, what the value function expected
    advantage                            float32
    is_better                            bool, what a policy is told

Read next: `labels.py`, which reads it; `tools/label_advantages.py`, which writes it.
"""

import hashlib
from pathlib import Path

import numpy as np

from openpi_train.data.core import files
from openpi_train.data.core.source import Source
from openpi_train.data.formats.lerobot.lerobot_metadata import require

_FINGERPRINT, _INDICATOR = b"dataset", "is_better"


def write_advantages(
    path: Path, source: Source, returns: np.ndarray, values: np.ndarray, advantages: np.ndarray, is_better: np.ndarray
) -> None:
    """Write the file; each array is [steps]."""
    arrow, parquet = require("pyarrow"), require("pyarrow.parquet")
    lengths = np.diff(source.episode_ends, prepend=0)
    index = np.arange(source.num_steps)
    columns = {
        "index": index,
        "episode_index": np.repeat(np.arange(len(lengths)), lengths),
        "frame_index": index - np.repeat(np.asarray(source.episode_ends) - lengths, lengths),
        "return": returns.astype(np.float32),
        "value": values.astype(np.float32),
        "advantage": advantages.astype(np.float32),
        _INDICATOR: is_better.astype(bool),
    }
    table = arrow.table(columns).replace_schema_metadata({_FINGERPRINT: source.fingerprint.encode()})
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as file:
        parquet.write_table(table, file)


def read_indicator(path: str, fingerprint: str) -> np.ndarray:
    """`is_better`, bool [steps], of the dataset with this fingerprint.

    Raises FileNotFoundError if there is no such file, ValueError if it is of another dataset.
    """
    flag = f"--data.datasets.N.advantages {path}"
    if not Path(path).is_file():
        raise FileNotFoundError(f"{flag}: there is no such file; `data advantages RUN --out FOLDER` writes it")
    table = require("pyarrow.parquet").read_table(path)
    metadata = table.schema.metadata or {}
    if _INDICATOR not in table.column_names or _FINGERPRINT not in metadata:
        raise ValueError(f"{flag} was not written by `data advantages`")
    if metadata[_FINGERPRINT].decode() != fingerprint:
        raise ValueError(
            f"{flag} was made of another dataset than this one, or the dataset has changed since: write it again with "
            "`data advantages`"
        )
    return table[_INDICATOR].to_numpy()


def digest(path: str) -> str:
    """The sha256 of the file."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
