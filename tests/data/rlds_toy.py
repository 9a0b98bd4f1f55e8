"""Small written RLDS datasets for the tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from openpi_train.data.formats.rlds import Rlds
from openpi_train.data.formats.rlds.rlds_writer import write_rlds

SIZE = (12, 16)


def toy_features():
    import tensorflow_datasets as tfds

    picture = {"shape": (*SIZE, 3), "dtype": np.uint8}
    return tfds.features.FeaturesDict(
        {
            "steps": tfds.features.Dataset(
                {
                    "observation": {
                        "image_0": tfds.features.Image(**picture, encoding_format="jpeg"),
                        "wrist": tfds.features.Image(**picture, encoding_format="png"),
                        "depth": tfds.features.Image(shape=(*SIZE, 1), dtype=np.uint8, encoding_format="png"),
                        "state": tfds.features.Tensor(shape=(3,), dtype=np.float32),
                    },
                    "action": tfds.features.Tensor(shape=(2,), dtype=np.float32),
                    "counter": tfds.features.Scalar(dtype=np.int64),
                    "embedding": tfds.features.Tensor(shape=(300,), dtype=np.float32),
                    "is_first": tfds.features.Scalar(dtype=np.bool_),
                    "is_last": tfds.features.Scalar(dtype=np.bool_),
                    "is_terminal": tfds.features.Scalar(dtype=np.bool_),
                    "reward": tfds.features.Scalar(dtype=np.float32),
                    "discount": tfds.features.Scalar(dtype=np.float32),
                    "language_instruction": tfds.features.Text(),
                }
            ),
            "episode_metadata": {"task": tfds.features.Text(), "seed": tfds.features.Scalar(dtype=np.int32)},
        }
    )


def toy_episode(seed: int, num_steps: int) -> dict:
    """An episode as one mapping of arrays; equal seeds give equal episodes."""
    rng = np.random.default_rng(seed)
    times = np.arange(num_steps)
    return {
        "steps": {
            "observation": {
                "image_0": rng.integers(0, 256, (num_steps, *SIZE, 3), np.uint8),
                "wrist": rng.integers(0, 256, (num_steps, *SIZE, 3), np.uint8),
                "depth": rng.integers(0, 256, (num_steps, *SIZE, 1), np.uint8),
                "state": rng.normal(size=(num_steps, 3)).astype(np.float32),
            },
            "action": rng.normal(size=(num_steps, 2)).astype(np.float32),
            "counter": rng.integers(-(2**62), 2**62, num_steps),
            "embedding": rng.normal(size=(num_steps, 300)).astype(np.float32),
            "is_first": times == 0,
            "is_last": times == num_steps - 1,
            "is_terminal": times == num_steps - 1,
            "reward": (times == num_steps - 1).astype(np.float32),
            "discount": np.ones(num_steps, np.float32),
            "language_instruction": [f"push the {('red', 'grün', 'blue')[seed % 3]} block"] * num_steps,
        },
        "episode_metadata": {"task": f"task {seed % 2}", "seed": seed},
    }


def toy_episodes(seeds) -> Iterator[dict]:
    """Episodes of 3 to 7 steps."""
    return (toy_episode(seed, 3 + seed % 5) for seed in seeds)


def write_toy(directory: Path, seeds=range(12), version: str = "1.0.0", shard_size_mb: float = 0.03, **splits) -> Path:
    """A toy dataset of several shards; returns its version directory."""
    return write_rlds(
        directory,
        name="toy",
        version=version,
        features=toy_features(),
        splits={"train": toy_episodes(seeds), **splits},
        shard_size_mb=shard_size_mb,
    )


def toy_source(path: Path, cache: Path, **fields) -> Rlds:
    """The config of a toy dataset with its index below `cache`."""
    return Rlds(path=str(path), cache_dir=str(cache), **fields)
