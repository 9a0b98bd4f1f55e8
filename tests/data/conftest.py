"""Small fake data, and a batch spec as a model would give it."""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from openpi_train.data.make.fake import FakeData
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.data.robot.opened import OpenedDatasets, open_data
from openpi_train.data.robot.transforms import PadDims, ResizeImages, TokenizePrompt
from openpi_train.data.robot.windows import WindowShape
from openpi_train.data.tokenizers.tokenizer import load_tokenizer, train_tokenizer
from openpi_train.robots.bridge import Bridge
from openpi_train.types import action_batch

HORIZON, SIZE, PROMPT, WIDTH = 4, 8, 24, 10
SMALL = {"num_episodes": 6, "episode_length": 9, "image_height": 12, "image_width": 16}


def batch_spec(batch_size, cameras):
    """The shapes of a model of action width 10, horizon 4, 8 x 8 images and 24 prompt tokens."""

    def spec(dtype, *shape):
        return jax.ShapeDtypeStruct((batch_size, *shape), dtype)

    return action_batch(
        {
            **{f"image/{slot}": spec(jnp.uint8, SIZE, SIZE, 3) for slot in cameras},
            **{f"image_mask/{slot}": spec(jnp.bool_) for slot in cameras},
            "state": spec(jnp.float32, WIDTH),
            "prompt_tokens": spec(jnp.int32, PROMPT),
            "prompt_mask": spec(jnp.bool_, PROMPT),
            "actions": spec(jnp.float32, HORIZON, WIDTH),
            "action_mask": spec(jnp.bool_, HORIZON),
            "dim_mask": spec(jnp.bool_, WIDTH),
            "row": spec(jnp.int32),
        }
    )


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "small.model"
    train_tokenizer([*FakeData().prompts] * 20, path, 400)
    return path


@pytest.fixture
def open_small(tmp_path, tokenizer_path) -> Callable[..., OpenedDatasets]:
    """Opens a `DataConfig` for the small model."""
    tokenizer = load_tokenizer(str(tokenizer_path))
    transforms = (ResizeImages(SIZE), TokenizePrompt(tokenizer, PROMPT), PadDims(WIDTH))

    def opened(config: DataConfig, seed: int = 7, **options) -> OpenedDatasets:
        arguments = {
            "transforms": transforms,
            "batch_spec": batch_spec,
            "normalization": "z_score",
            "shape": WindowShape(horizon=HORIZON),
        }
        return open_data(config, seed=seed, assets_dir=tmp_path / "assets", **{**arguments, **options})

    return opened


@pytest.fixture
def mixture_config() -> DataConfig:
    """Two robots, of which only the second has a wrist camera."""
    two_cameras = ("observation/image_0", "observation/image_1")
    first = Dataset(source=FakeData(**SMALL), robot=Bridge(trajectory=True), asset_id="first", weight=3.0)
    second = Dataset(
        source=FakeData(**SMALL, seed=1, cameras=two_cameras),
        robot=Bridge(cameras=dict(zip(("base_0_rgb", "left_wrist_0_rgb"), two_cameras, strict=True))),
        asset_id="second",
    )
    return DataConfig(datasets=(first, second), validation_fraction=0.2)
