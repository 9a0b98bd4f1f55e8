"""A tiny PaliGemma of transformers (`paligemma/`), as our config and parameters."""

import functools
import json
from pathlib import Path

import numpy as np

from openpi_train.checkpoints.weights import CheckpointWeightLoader
from openpi_train.interop import safetensors_file
from openpi_train.interop.place import Place
from openpi_train.models.paligemma import PaliGemmaFlowConfig
from openpi_train.nn.gemma_sizes import GemmaOverrides
from openpi_train.nn.siglip import SiglipConfig

GENUINE = Path(__file__).parents[2] / "interop" / "paligemma"
SIZES = json.loads((GENUINE / "made_with.json").read_text())["sizes"]
CONFIG = PaliGemmaFlowConfig(
    paligemma_variant="dummy",
    language=GemmaOverrides(**SIZES["language"]),
    head_variant="dummy",
    head=GemmaOverrides(depth=1),
    siglip=SiglipConfig(**SIZES["siglip"]),
    image_size=SIZES["image_size"],
    vocab_size=SIZES["vocab_size"],
    max_token_len=6,
    dtype="float32",
    remat="none",
)
TABLE = "language_model.model.embed_tokens.weight"
# The names on the hub, of those that transformers 5 writes.
OLD = ((r"^vision_tower\.", "vision_tower.vision_model."),)


@functools.cache
def loaded():
    """The backbone's parameters by our path, as a run would start from them."""
    leaves = CheckpointWeightLoader(params_path=str(GENUINE)).load(CONFIG)
    return {path: leaf.whole() for path, leaf in leaves.items()}


def tensors():
    return dict(safetensors_file.open_model(Place.of(GENUINE)))


def load(where, config=CONFIG):
    return CheckpointWeightLoader(params_path=str(where)).load(config)


def assert_same(found, expected):
    assert set(found) == set(expected)
    for path, leaf in found.items():
        np.testing.assert_array_equal(leaf.whole().astype(np.float32), expected[path].astype(np.float32), err_msg=path)


def published(dtype=np.float32):
    """The genuine parameters as big_vision names them."""
    names = {CONFIG.param_rules.public_name(path): leaf.astype(dtype) for path, leaf in loaded().items()}
    return {name.replace("PaliGemma/", "params/"): leaf for name, leaf in names.items()}
