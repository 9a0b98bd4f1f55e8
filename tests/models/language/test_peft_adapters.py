"""Adapters by PEFT: they compute what PEFT computes, as a run's adapter and folded in, and come back bit for bit.

`language/adapters` holds genuine ones with PEFT's outputs, and `language/make_adapters.py` made them.
"""

import functools
import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchanged import TINY
from flax import nnx

from openpi_train.checkpoints.checkpoint_formats import open_checkpoint
from openpi_train.checkpoints.weights import CheckpointWeightLoader
from openpi_train.interop import safetensors_file
from openpi_train.interop.openpi import parameter_names, parameter_shapes
from openpi_train.interop.place import Place
from openpi_train.interop.stored_leaves import Stored, in_memory
from openpi_train.models.language import huggingface, peft_adapter
from openpi_train.models.language.reference import ReferencedConfig
from openpi_train.models.language.reward import RewardConfig
from openpi_train.models.model_config import ModelConfig
from openpi_train.nn.lora import AdapterConfig
from openpi_train.parallel.params import merge_module
from openpi_train.runtime.exits import CheckpointError, UsageError

GENUINE = Path(__file__).parents[2] / "interop" / "language"
# The base model of each, and the adapter of a run that starts from it.
ADAPTERS = {
    "everything": ("qwen2", AdapterConfig(rank=3, alpha=5.0)),
    "two_weights": ("llama", AdapterConfig(rank=2, alpha=3.0, rslora=True, mlp=False)),
    "one_layer": ("gemma3", AdapterConfig(rank=2, alpha=8.0)),
    "score": ("reward", AdapterConfig(rank=2, alpha=4.0)),
}
PLAIN = AdapterConfig()


def model_of(base: str, adapter: AdapterConfig = PLAIN) -> ModelConfig:
    fields = {"dtype": "float32", "remat": "none", "adapter": adapter}
    language = huggingface.read_model(Place.of(GENUINE / base), **fields)
    return RewardConfig(language=language) if base == "reward" else language


@functools.cache
def loaded(name: str, folded: bool):
    """The model that a run trains, and the parameters that it starts from."""
    base, adapter = ADAPTERS[name]
    model = model_of(base, PLAIN if folded else adapter)
    loader = CheckpointWeightLoader(params_path=str(GENUINE / base), adapter_path=str(GENUINE / "adapters" / name))
    return model, {path: jnp.asarray(leaf.whole(), jnp.float32) for path, leaf in loader.load(model).items()}


def outputs(model: ModelConfig, params, tokens, is_token):
    """Logits of every token, or the reward of every text."""
    built = merge_module(nnx.split(nnx.eval_shape(lambda: model.build(nnx.Rngs(0))))[0], params)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    segments = jnp.asarray(is_token, jnp.int32)
    if isinstance(model, RewardConfig):
        return built.rewards(tokens, positions, segments, num_segments=1)
    return built.logits(built(tokens, positions, segments))


@pytest.mark.slow
@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("name", ADAPTERS)
def test_outputs_are_pefts(name, folded):
    model, params = loaded(name, folded)
    assert {path: leaf.shape for path, leaf in params.items()} == parameter_shapes(model)
    with np.load(GENUINE / "adapters" / name / "io.npz") as io:
        tokens, is_token, expected = (io[part] for part in ("tokens", "is_token", "float32"))
    found = np.asarray(jax.jit(functools.partial(outputs, model))(params, jnp.asarray(tokens), is_token))
    if not isinstance(model, RewardConfig):
        found, expected = found[is_token], expected[is_token]
    # float32 sums in other orders: of x A B, or of x (W + A B).
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def tensors(folder):
    return {
        name: leaf.whole() for name, leaf in safetensors_file.open_file(Place.of(folder), peft_adapter.FILE).items()
    }


def written(name, folder, experiment=None):
    """The adapter of a run that started from it, as it is written."""
    model, params = loaded(name, False)
    names = parameter_names(model)
    stored = Stored(
        where="memory",
        format="ours",
        params={names[path]: in_memory(np.asarray(leaf)) for path, leaf in params.items()},
        experiment=experiment,
    )
    peft_adapter.write(folder, stored, model)
    return tensors(folder), json.loads((folder / peft_adapter.CONFIG).read_text())


@pytest.mark.parametrize("name", ADAPTERS)
def test_what_was_read_is_written_bit_for_bit(name, tmp_path):
    """Where PEFT adapts some layers alone, the others have zeros."""
    genuine = GENUINE / "adapters" / name
    found, config = written(name, tmp_path / "out")
    expected = tensors(genuine)
    added = found.keys() - expected.keys()
    assert expected.keys() <= found.keys() and not any(found[tensor].any() for tensor in added)
    assert (name == "one_layer") == bool(added)
    for tensor, values in expected.items():
        assert found[tensor].dtype == values.dtype and found[tensor].tobytes() == values.tobytes(), tensor
    said = json.loads((genuine / peft_adapter.CONFIG).read_text())
    for key in ("peft_type", "task_type", "r", "lora_alpha", "use_rslora", "bias", "fan_in_fan_out"):
        assert config[key] == said[key], key
    assert set(config["target_modules"]) == set(said["target_modules"])
    assert set(config["modules_to_save"] or ()) == set(said["modules_to_save"] or ()) - {"classifier"}


@pytest.mark.slow
def test_weights_that_are_not_adapted_get_no_gradient():
    """Of two_weights the keys and the outputs; so PEFT's choice of weights holds in a run that goes on."""
    model, params = loaded("two_weights", False)
    tokens = jnp.arange(3, 11)[None]
    gradient = jax.jit(jax.grad(lambda params: outputs(model, params, tokens, tokens > 0).sum()))(params)
    attention = "layers/attention"
    for factor in ("lora_a", "lora_b"):
        keys, values = np.moveaxis(np.asarray(gradient[f"{attention}/key_value/{factor}"]), 1, 0)
        assert not keys.any() and values.any()
        assert not np.asarray(gradient[f"{attention}/output/{factor}"]).any()
        assert np.asarray(gradient[f"{attention}/query/{factor}"]).any()


def test_the_base_model_is_named(tmp_path, caplog):
    def base(**experiment):
        _, config = written("everything", tmp_path / str(len(list(tmp_path.iterdir()))), experiment)
        return config["base_model_name_or_path"], config["revision"]

    def started(path):
        return {"weight_loader": {"params_path": path}, "model": {"path": "hub:other/model"}}

    assert base(**started("hub:Qwen/Qwen2.5-0.5B@abc")) == ("Qwen/Qwen2.5-0.5B", "abc")
    assert base(**started(str(GENUINE / "qwen2"))) == (str(GENUINE / "qwen2"), None)
    assert base(model={"language": {"path": "hub:me/base"}}) == ("me/base", None) and not caplog.text
    assert base(**started(str(tmp_path))) == (None, None) and "set base_model_name_or_path" in caplog.text


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(GENUINE / "adapters" / "everything", tmp_path / "copy"))


def start(folder, base="qwen2", adapter=ADAPTERS["everything"][1]):
    loader = CheckpointWeightLoader(params_path=str(GENUINE / base), adapter_path=str(folder))
    return loader.load(model_of(base, adapter))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"peft_type": "IA3"}, r"adapters of type 'IA3' are not known; known is LORA"),
        ({"use_dora": True}, r"use_dora True is not computed here; merge that adapter into its base model by PEFT"),
        ({"rank_pattern": {"q_proj": 4}}, r"rank_pattern \{'q_proj': 4\} is not computed here"),
        ({"bias": "all"}, r"bias 'all' is not computed here"),
        ({"init_lora_weights": "pissa"}, r"init_lora_weights 'pissa' is not computed here"),
        ({"modules_to_save": ["embed_tokens"]}, r"modules_to_save \['embed_tokens'\] is not computed here"),
        ({"r": None}, r"needs r and lora_alpha, and says None and 5; fetch it again"),
        ({"r": 4}, r"adapter_config.json says r 4, and adapter_model.safetensors has factors of rank 3: .*correct r"),
        ({"lora_alpha": 7}, r"is another adapter than the experiment's; give its settings: --model.adapter.alpha 7.0$"),
        ({"use_rslora": True}, r"give its settings: --model.adapter.rslora True$"),
    ],
)
def test_settings_that_differ_are_named(folder, changed, says):
    file = folder / peft_adapter.CONFIG
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    with pytest.raises(CheckpointError, match=says):
        start(folder)


def test_parts_that_the_run_does_not_adapt_are_named(folder):
    with pytest.raises(CheckpointError, match=r"give its settings: --model.adapter.mlp True"):
        start(folder, adapter=AdapterConfig(rank=3, alpha=5.0, mlp=False))


@pytest.mark.parametrize(
    ("base", "warns"),
    [("other/base", True), ("user/QWEN2", False), ("/models/qwen2/", False), ("hub:a/qwen2@v1", False), (None, False)],
)
def test_another_base_than_the_adapters_is_told(folder, caplog, base, warns):
    file = folder / peft_adapter.CONFIG
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": base}))
    start(folder)
    assert (f"says that it was trained on {base}, and is added to {GENUINE / 'qwen2'}" in caplog.text) == warns


def test_weights_without_an_addition_are_logged(caplog):
    start(GENUINE / "adapters" / "two_weights", "llama", AdapterConfig(rank=2, alpha=3.0, rslora=True))
    assert re.search(r"leaves out down_proj, gate_proj, k_proj, o_proj, up_proj", caplog.text)


def test_tensors_that_are_not_of_layers_or_of_other_sizes_are_named(folder):
    with pytest.raises(CheckpointError, match=r"(?s)of another shape.*-> it is an adapter of a model of other sizes"):
        start(folder, "llama")
    table = {"base_model.model.model.embed_tokens.lora_embedding_A": in_memory(np.ones((3, 32), np.float32))}
    more = safetensors_file.open_file(Place.of(folder), peft_adapter.FILE) | table
    safetensors_file.write_file(
        folder / peft_adapter.FILE, {name: in_memory(one.whole()) for name, one in more.items()}
    )
    with pytest.raises(
        CheckpointError, match=r"embed_tokens.lora_embedding_A \(1 such tensors\): ours adapt.*not tables or heads"
    ):
        start(folder)


def test_a_factor_without_the_other_is_named(folder):
    lost = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    rest = {name: in_memory(values) for name, values in tensors(folder).items() if name != lost}
    safetensors_file.write_file(folder / peft_adapter.FILE, rest)
    with pytest.raises(CheckpointError, match=rf"lacks {lost}, the other factor of one that it holds; fetch it again"):
        start(folder)


def test_a_pickled_adapter_is_refused(folder):
    (folder / peft_adapter.FILE).rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"only adapter_model.bin, which is not read: save it as safetensors"):
        start(folder)


def test_an_adapter_alone_says_what_it_needs(folder):
    model = model_of("qwen2", ADAPTERS["everything"][1])
    assert open_checkpoint(folder, model).format == "peft"
    with pytest.raises(UsageError, match=r"is an adapter, without the weights.*as --weight-loader.adapter-path"):
        CheckpointWeightLoader(params_path=str(folder)).load(model)
    with pytest.raises(
        UsageError, match=r"--weight-loader.adapter-path needs the weights.*--weight-loader.params-path"
    ):
        CheckpointWeightLoader(adapter_path=str(folder)).load(model)
    with pytest.raises(UsageError, match=r"holds an adapter, without the weights that it is added to"):
        open_checkpoint(folder)


def test_models_that_take_no_adapter_are_named(folder, tmp_path):
    with pytest.raises(CheckpointError, match=r"is an adapter of a language model, and this is for a Pi0Config"):
        open_checkpoint(folder, TINY.model)
    params = open_checkpoint(GENUINE / "qwen2", model_of("qwen2"))
    for model in (model_of("qwen2"), TINY.model):
        with pytest.raises(UsageError, match=r"--to peft writes low-rank adapters of language models"):
            peft_adapter.write(tmp_path / "out", params, model)


def test_a_policy_and_its_reference_start_with_the_adapter_folded_in(folder):
    loader = CheckpointWeightLoader(params_path=str(GENUINE / "qwen2"), adapter_path=str(folder))
    _, expected = loaded("everything", True)
    found = loader.load(ReferencedConfig(policy=model_of("qwen2")))
    for path, leaf in expected.items():
        for part in ("policy/", "reference/"):
            np.testing.assert_array_equal(np.asarray(found[part + path].whole(), np.float32), leaf, err_msg=path)


def test_a_reward_models_adapter_goes_onto_a_language_model():
    """Its score comes with it."""
    language = huggingface.read_model(Place.of(GENUINE / "llama"), dtype="float32", remat="none")
    adapter = GENUINE / "adapters" / "score"
    loader = CheckpointWeightLoader(params_path=str(GENUINE / "llama"), adapter_path=str(adapter))
    found = loader.load(RewardConfig(language=language))
    score = tensors(adapter)["base_model.model.score.weight"]
    np.testing.assert_array_equal(found["score/weight"].whole(), score)
    assert found.keys() == parameter_shapes(RewardConfig(language=language)).keys()
