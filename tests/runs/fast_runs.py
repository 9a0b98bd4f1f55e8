"""pi0-FAST and the insulated pi0.5 on made-up data, as small as can be; `test_pi0_fast_run.py` trains them."""

import dataclasses

from openpi_train import registry
from openpi_train.data.make.fake import FakeData
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.experiment import EvalConfig
from openpi_train.nn.gemma_sizes import GemmaOverrides
from openpi_train.nn.siglip import SiglipConfig
from openpi_train.robots.bridge import Bridge

_SIZES = {
    "language": GemmaOverrides(width=32, depth=2, mlp_dim=64, num_heads=2, head_dim=8),
    "siglip": SiglipConfig(width=16, depth=1, mlp_dim=32, num_heads=2, patch_size=16),
    "image_size": 32,
    "action_horizon": 4,
    "max_token_len": 136,
    "vocab_size": 800,
    "remat": "none",
}
_RUN = {
    "data": DataConfig(
        datasets=(Dataset(source=FakeData(image_height=32, image_width=32), robot=Bridge(), asset_id="fake"),),
        tokenizer="bytes",
    ),
    "batch_size": 8,
    "num_train_steps": 20,
    "log_interval": 1,
    "save_interval": 10,
    "eval": EvalConfig(interval=0, num_rows=8, num_sample_steps=2),
}

_fast, _insulated = registry.load("pi0_fast_tiny"), registry.load("pi05_insulated_tiny")
fast = dataclasses.replace(_fast, model=dataclasses.replace(_fast.model, **_SIZES, max_decoding_steps=16), **_RUN)
insulated = dataclasses.replace(
    _insulated, model=dataclasses.replace(_insulated.model, **_SIZES, action_expert=_SIZES["language"]), **_RUN
)
