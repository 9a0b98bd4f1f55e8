"""Reward models in Hugging Face's form: `language/reward` holds one, and what transformers computes with it."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from exchanged import TINY
from flax import nnx

from openpi_train.checkpoints.checkpoint_formats import open_checkpoint
from openpi_train.checkpoints.weights import CheckpointWeightLoader
from openpi_train.interop import openpi, safetensors_file
from openpi_train.interop.openpi import parameter_names, parameter_shapes
from openpi_train.interop.place import Place
from openpi_train.interop.stored_leaves import Stored, in_memory
from openpi_train.models.language import LanguageConfig, huggingface
from openpi_train.models.language.reference import ReferencedConfig
from openpi_train.models.language.reward import RewardConfig
from openpi_train.nn.lora import AdapterConfig
from openpi_train.parallel.params import merge_module
from openpi_train.runtime.exits import CheckpointError, UsageError
from openpi_train.tools.convert_checkpoint import plan
from openpi_train.tools.requests import ConvertRequest

GENUINE = Path(__file__).parents[2] / "interop" / "language" / "reward"


def reward_model(folder=GENUINE) -> RewardConfig:
    return RewardConfig(language=huggingface.read_model(Place.of(folder), dtype="float32", remat="none"))


def load(model, folder=GENUINE):
    return CheckpointWeightLoader(params_path=str(folder)).load(model)


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(GENUINE, tmp_path / "copy"))


@pytest.mark.slow
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


def tensors(folder):
    return {name: leaf.whole() for name, leaf in safetensors_file.open_model(Place.of(folder)).items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, values in found.items():
        assert values.dtype == expected[name].dtype and values.tobytes() == expected[name].tobytes(), name


@pytest.mark.slow
def test_it_is_written_back_bit_for_bit(tmp_path):
    """Through a checkpoint of ours."""
    experiment = dataclasses.replace(TINY, model=reward_model())

    def convert(source, target, **flags):
        return plan(ConvertRequest(source=str(source), target=target, **flags), experiment).run()

    ours = convert(GENUINE, tmp_path / "ours")
    back = convert(ours, tmp_path / "back", target_format="huggingface")
    assert_same(tensors(back), tensors(GENUINE))
    assert (back / "config.json").read_bytes() == (GENUINE / "config.json").read_bytes()
    report = json.loads((back / "parity.json").read_text())
    assert report["outputs"]["rewards"]["largest_difference"] == 0 < report["outputs"]["rewards"]["largest_value"]
    assert report["merged_into_weights"] == report["parameters_left_out"] == []


# By family the name of the class in transformers 5.23.
CLASSES = {
    "gemma": "GemmaForSequenceClassification",
    "gemma2": "Gemma2ForSequenceClassification",
    "gemma3": "Gemma3TextForSequenceClassification",
    "llama": "LlamaForSequenceClassification",
    "qwen2": "Qwen2ForSequenceClassification",
    "qwen3": "Qwen3ForSequenceClassification",
    "mistral": "MistralForSequenceClassification",
}


@pytest.mark.parametrize("name", CLASSES)
def test_a_config_of_ours_says_a_reward_model_of_each_family(tmp_path, name):
    """It reads back as the model that was written."""
    language = huggingface.read_model(Place.of(GENUINE.parent / name), dtype="float32", remat="none")
    model = RewardConfig(language=language)
    names = parameter_names(model)
    params = {names[path]: in_memory(np.ones(shape, np.float32)) for path, shape in parameter_shapes(model).items()}
    carried = huggingface.CarriedFiles(str(GENUINE.parent / name))  # its config is that of another kind of model
    stored = Stored(where="memory", format="ours", params=params, token_files=carried)
    huggingface.write(tmp_path / "out", stored, model)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert config.num_labels == 1 and config.pad_token_id == 0
    assert config.architectures == [CLASSES[name]]
    found = open_checkpoint(tmp_path / "out", model)
    assert found.params.keys() == params.keys()


@pytest.mark.slow
def test_of_a_policy_and_its_reference_the_policy_is_written(tmp_path):
    policy = huggingface.read_model(Place.of(GENUINE.parent / "smollm2"), dtype="float32", remat="none")
    model = ReferencedConfig(policy=policy)
    leaves = load(model, GENUINE.parent / "smollm2")
    names = parameter_names(model)
    # The reference has other values than the policy.
    params = {
        names[path]: in_memory(leaf.whole() * (0 if path.startswith("reference/") else 1))
        for path, leaf in leaves.items()
    }
    openpi.write(tmp_path / "run", Stored(where="memory", format="openpi", params=params))
    request = ConvertRequest(source=str(tmp_path / "run"), target=tmp_path / "out", target_format="huggingface")
    conversion = plan(request, dataclasses.replace(TINY, model=model))
    assert f"left out: {len(params) // 2} parameters that --to huggingface does not hold" in conversion.summary()
    assert_same(tensors(conversion.run()), tensors(GENUINE.parent / "smollm2"))
    report = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert report["outputs"]["token_scores"]["largest_difference"] == 0 and report["merged_into_weights"] == []
    assert report["parameters_left_out"] == sorted(name for name in params if name.startswith("reference/"))


def test_factors_beside_the_weights_are_not_written(tmp_path):
    model = reward_model()
    adapted = RewardConfig(language=dataclasses.replace(model.language, adapter=AdapterConfig(rank=2)))
    names = parameter_names(adapted)
    params = {names[path]: in_memory(np.ones(shape, np.float32)) for path, shape in parameter_shapes(adapted).items()}
    with pytest.raises(UsageError, match="10 low-rank factors beside them: fold them in with --merge-lora"):
        huggingface.write(tmp_path / "out", Stored(where="memory", format="ours", params=params), adapted)
