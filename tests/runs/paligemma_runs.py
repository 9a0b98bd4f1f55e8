"""The small PaliGemma policies on made-up data; `test_paligemma_run.py` trains them."""

import dataclasses

from openpi_train import registry
from openpi_train.data.config import DataConfig, Dataset
from openpi_train.data.fake import FakeData
from openpi_train.robots.bridge import Bridge

_DATA = DataConfig(
    datasets=(Dataset(source=FakeData(image_height=64, image_width=64), robot=Bridge(), asset_id="fake"),),
    tokenizer="bytes",
    text_lengths=1,
)
_flow, _tokens = registry.load("paligemma_tiny"), registry.load("paligemma_tokens_tiny")

flow = dataclasses.replace(_flow, data=_DATA, model=dataclasses.replace(_flow.model, max_token_len=32))
"""Its actions by flow matching."""

tokens = dataclasses.replace(_tokens, data=_DATA, model=dataclasses.replace(_tokens.model, max_token_len=192))
"""Its actions as FAST tokens."""
