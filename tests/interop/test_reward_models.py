"""Reward models in Hugging Face's form: `language/reward` holds one, and what transformers computes with it."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from openpi_train.interop import huggingface, safetensors_file
from openpi_train.interop.openpi import parameter_shapes
from openpi_train.interop.place import Place
from openpi_train.interop.stored_leaves import in_memory
from openpi_train.interop.weights import CheckpointWeightLoader
from openpi_train.models.language import LanguageConfig
from openpi_train.models.reward import RewardConfig
from openpi_train.nn.params import merge_module
from openpi_train.runtime.exits import CheckpointError

GENUINE = Path(__file__).parent / "language" / "reward"


def reward_model(folder=GENUINE) -> RewardConfig:
    return RewardConfig(language=huggingface.read_model(Place.of(folder), dtype="float32", remat="none"))


def load(model, folder=GENUINE):
    return CheckpointWeightLoader(params_path=str(folder)).load(model)


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(GENUINE, tmp_path / "copy"))


def test_rewards_are_those_of_transformers():
    """The second text is padded: it is the last token of the text that has a score."""
    model = reward_model()
    params = {path: jnp.asarray(leaf.whole(), jnp.float32) for path, leaf in load(model).items()}
    assert {path: leaf.shape for path, leaf in params.items()} == parameter_shapes(model)
    with np.load(GENUINE / "io.npz") as io:
        tokens, is_token, expected = (io[name] for name in ("tokens", "is_token", "float32"))
    built = merge_module(nnx.split(model.build(nnx.Rngs(0)))[0], params)
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    found = built.rewards(*map(jnp.asarray, (tokens, positions, is_token.astype(np.int32))), num_segments=1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_a_language_model_does_not_start_from_one():
    model = reward_model().language
    with pytest.raises(CheckpointError, match=r"(?s)score/weight.*-> it is a reward model: train a RewardConfig"):
        load(model)


def test_models_of_several_classes_are_refused(folder):
    file = folder / safetensors_file.FILE
    tensors = dict(safetensors_file.open_model(Place.of(folder)))
    tensors["score.weight"] = in_memory(np.ones((3, 16), np.float32))
    safetensors_file.write_file(file, tensors)
    with pytest.raises(CheckpointError, match=r"tells 3 classes apart \(score.weight is \(3, 16\)\).*num_labels 1"):
        load(reward_model(), folder)


def test_one_that_says_that_its_tables_are_tied_has_one_table(folder):
    """The key says nothing of a model without scores of tokens."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    model = reward_model(folder)
    assert model.language.sizes.tied and load(model, folder).keys() == parameter_shapes(model).keys()
    assert isinstance(model.language, LanguageConfig)
