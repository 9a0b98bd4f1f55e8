"""A project folder of the PaliGemma VLA's trainer: its config, and episodes in parquet files."""

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from openpi_train.data.core.image import encode

CONFIG = Path(__file__).parent / "doors" / "vla" / "vla_config.yaml"
# Lengths of the episodes of each file.
LENGTHS = {"a": (5, 3), "b": (4,)}
DIMS = 7


def write_vla_project(folder: Path) -> Path:
    """Write the project, and return its folder."""
    (folder / "configs").mkdir(parents=True, exist_ok=True)
    shutil.copy(CONFIG, folder / "configs")
    for name in ("training", "validation"):
        write_episodes(folder / "dataset" / name)
    return folder


def write_episodes(folder: Path, dims: int = DIMS) -> Path:
    """Write two files of episodes, whose values are a function of the row. The second camera has no pictures."""
    folder.mkdir(parents=True)
    for number, (name, lengths) in enumerate(LENGTHS.items()):
        rows = rows_of(number, dims)
        firsts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        columns = {
            "image_1": [encode(picture, "png") for picture in rows["image_1"]],
            "image_2": pa.array([None] * sum(lengths), pa.binary()),
            "state": rows["state"].tolist(),
            "action": rows["action"].tolist(),
            "is_first": np.isin(np.arange(sum(lengths)), firsts).tolist(),
            "prompt": [f"pick {name}"] * sum(lengths),
        }
        parquet.write_table(pa.table(columns), folder / f"{name}.parquet")
    return folder


def rows_of(number: int, dims: int = DIMS) -> dict[str, np.ndarray]:
    """What the rows of a file hold."""
    rng, num_rows = np.random.default_rng(number), sum(list(LENGTHS.values())[number])
    return {
        "image_1": rng.integers(0, 256, (num_rows, 12, 16, 3), dtype=np.uint8),
        "state": rng.normal(size=(num_rows, dims)).astype(np.float32),
        "action": rng.normal(size=(num_rows, dims)).astype(np.float32),
    }
