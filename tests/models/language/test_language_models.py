"""Language models in Hugging Face's form: they compute what `transformers` computes, and come back bit for bit.

`language/` holds genuine files and outputs of transformers, and `make.py`, which made them.
"""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
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
from openpi_train.models.language import huggingface
from openpi_train.models.language.huggingface import hf_layout
from openpi_train.models.language.reference import ReferencedConfig
from openpi_train.models.language.reward import RewardConfig
from openpi_train.nn.lora import AdapterConfig
from openpi_train.parallel.params import merge_module
from openpi_train.runtime.exits import CheckpointError, UsageError
from openpi_train.tools.convert_checkpoint import plan
from openpi_train.tools.requests import ConvertRequest

GENUINE = Path(__file__).parents[2] / "interop" / "language"
FAMILIES = ("gemma", "gemma2", "gemma3", "llama", "smollm2", "qwen2", "qwen3", "mistral")


def model_of(name: str, **fields):
    """The model's config, as its folder says it."""
    return huggingface.read_model(Place.of(GENUINE / name), **{"dtype": "float32", "remat": "none"} | fields)


@functools.cache
def recorded(name: str) -> dict[str, np.ndarray]:
    with np.load(GENUINE / name / "io.npz") as file:
        return dict(file)


@functools.cache
def loaded(name: str):
    """Graph and parameters by our path, as a run would start from them."""
    leaves = CheckpointWeightLoader(params_path=str(GENUINE / name)).load(model_of(name))
    return {path: jnp.asarray(leaf.whole(), jnp.float32) for path, leaf in leaves.items()}


def graph_of(config):
    return nnx.split(nnx.eval_shape(lambda: config.build(nnx.Rngs(0))))[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_scores_are_those_of_transformers(name, dtype):
    """float32 to 1e-5 of the largest score. In bfloat16, where other intermediates are rounded, no farther from float32
    than transformers is, to a quarter.
    """
    graph, io = graph_of(model_of(name, dtype=dtype)), recorded(name)

    @jax.jit
    def scores(params, tokens):
        model = merge_module(graph, params)
        return model.logits(model(tokens))

    found = np.asarray(scores(loaded(name), io["tokens"]))
    scale = np.abs(io["float32"]).max()
    ours, theirs = (np.abs(one - io["float32"]).max() / scale for one in (found, io["bfloat16"]))
    print(f"{name} {dtype}: {ours:.1e} of the largest score {scale:.2f} from float32; theirs in bfloat16 {theirs:.1e}")
    if dtype == "float32":
        assert ours < 1e-5
    else:
        assert 0 < ours < 1.25 * theirs


@pytest.mark.parametrize("name", FAMILIES)
def test_scores_with_a_cache_are_those_of_transformers(name):
    """The windows are shorter than the texts: what a token saw before, one that comes alone sees, and no more."""
    graph, io = graph_of(model_of(name)), recorded(name)
    tokens = jnp.asarray(io["tokens"])
    b, t = tokens.shape

    @jax.jit
    def scores(params):
        model = merge_module(graph, params)
        x, cache = model.prefill(tokens[:, :3], jnp.full(b, 3))

        def step(cache, token):
            x, cache = model.extend(token[:, None], cache)
            return cache, x[:, 0]

        _, later = jax.lax.scan(step, cache.grown(t - 3), tokens[:, 3:].T)
        return model.logits(jnp.concatenate([x, later.swapaxes(0, 1)], axis=1))

    found = np.asarray(scores(loaded(name)))
    np.testing.assert_allclose(found, io["float32"], rtol=0, atol=1e-5 * np.abs(io["float32"]).max())


@pytest.mark.slow
def test_the_loss_of_ragged_targets_and_its_gradient_are_torchs():
    config, io = model_of("gemma3"), recorded("gemma3")
    graph, targets = graph_of(config), jnp.asarray(io["labels"][:, 1:])

    @jax.jit
    def loss(params):
        model = merge_module(graph, params)
        counts = targets >= 0
        found = model.scores(model(jnp.asarray(io["tokens"]))[:, :-1], jnp.where(counts, targets, 0))
        return -(found.log_prob * counts).sum() / counts.sum()

    value, gradient = jax.value_and_grad(loss)(loaded("gemma3"))
    np.testing.assert_allclose(value, io["loss"], rtol=1e-5)
    theirs = {name.removeprefix("gradient/"): in_memory(leaf) for name, leaf in io.items() if "gradient/" in name}
    names = parameter_names(config)
    for path, leaf in gradient.items():
        expected = hf_layout(names[path], leaf.shape).joined(theirs).whole()
        # float32 sums in other orders; the smallest gradients are differences of larger terms.
        np.testing.assert_allclose(leaf, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max(), err_msg=path)


def tensors(name):
    return dict(safetensors_file.open_model(Place.of(GENUINE / name)))


def files_of(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def assert_same_tensors(found, expected):
    assert set(found) == set(expected)
    for name, leaf in found.items():
        assert (leaf.dtype, leaf.shape) == (expected[name].dtype, expected[name].shape)
        assert leaf.whole().tobytes() == expected[name].whole().tobytes(), name


@pytest.mark.parametrize("name", FAMILIES)
def test_what_was_read_is_written_bit_for_bit(tmp_path, name):
    config = model_of(name)
    huggingface.write(tmp_path / "out", open_checkpoint(GENUINE / name, config), config)
    assert_same_tensors(dict(safetensors_file.open_model(Place.of(tmp_path / "out"))), tensors(name))
    for file in ("config.json", "generation_config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (GENUINE / name / file).read_bytes()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_config_of_ours_says_the_same_model(tmp_path, name):
    config = model_of(name)
    stored = dataclasses.replace(open_checkpoint(GENUINE / name, config), token_files=None)
    huggingface.write(tmp_path / "out", stored, config)
    assert model_of(str(tmp_path / "out")) == config
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_a_large_model_is_written_in_files_that_an_index_names(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_file, "SHARD_BYTES", 4000)
    config = model_of("qwen3")
    huggingface.write(tmp_path / "out", open_checkpoint(GENUINE / "qwen3", config), config)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert_same_tensors(dict(safetensors_file.open_model(Place.of(tmp_path / "out"))), tensors("qwen3"))


def test_a_part_is_read_as_a_part():
    for path, leaf in CheckpointWeightLoader(params_path=str(GENUINE / "qwen2")).load(model_of("qwen2")).items():
        part = tuple(slice(size // 2, size) for size in leaf.shape)
        np.testing.assert_array_equal(leaf.read(part).astype(np.float32), loaded("qwen2")[path][part], err_msg=path)


def write_tokenizer(folder, ids, added=()):
    """A tokenizer.json with as many tokens, and these beside them."""
    said = {"model": {"type": "BPE", "vocab": {f"t{at}": at for at in range(ids)}}, "added_tokens": list(added)}
    (folder / "tokenizer.json").write_text(json.dumps(said))
    (folder / "chat_template.jinja").write_text("{{ messages }}\n")


@pytest.fixture
def folder(tmp_path):
    """A copy of a genuine folder."""
    return Path(shutil.copytree(GENUINE / "smollm2", tmp_path / "copy"))


@pytest.mark.slow
def test_it_goes_through_a_checkpoint_of_ours_with_all_that_belongs_to_it(tmp_path, folder):
    write_tokenizer(folder, 32)
    experiment = dataclasses.replace(TINY, model=model_of("smollm2"))

    def convert(source, target, **flags):
        return plan(ConvertRequest(source=str(source), target=target, **flags), experiment).run()

    ours = convert(folder, tmp_path / "ours")
    back = convert(ours, tmp_path / "back", target_format="huggingface")
    assert open_checkpoint(ours).format == "ours" and open_checkpoint(back).format == "huggingface"
    assert_same_tensors(dict(safetensors_file.open_model(Place.of(back))), tensors("smollm2"))
    carried = {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"}
    assert {name: files_of(back)[name] for name in carried} == {name: files_of(folder)[name] for name in carried}
    report = json.loads((back / "parity.json").read_text())
    assert report["parameters"]["bit_equal"] == report["parameters"]["leaves"] == len(loaded("smollm2"))
    assert report["outputs"]["token_scores"]["largest_difference"] == 0.0
    assert report["outputs"]["token_scores"]["largest_value"] > 1


@pytest.mark.parametrize(("dtype", "context_length"), [("float32", 64), ("bfloat16", 48)])
def test_another_type_or_context_is_said_in_a_config_of_its_own(tmp_path, folder, dtype, context_length):
    experiment = dataclasses.replace(TINY, model=model_of("smollm2", context_length=context_length))
    request = ConvertRequest(
        source=str(folder), target=tmp_path / "out", target_format="huggingface", dtype=dtype, outputs=False
    )
    config = json.loads((plan(request, experiment).run() / "config.json").read_text())
    assert (config["torch_dtype"], config["max_position_embeddings"]) == (dtype, context_length)
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (2, 1, 0)
    assert model_of(str(tmp_path / "out")) == experiment.model


def written_ends(tmp_path, folder, tokenizer, *, config=None, generation=None) -> dict:
    """What transformers takes of a folder that was written from one with these files, beyond its defaults."""
    words = {"</s>": 0, "<|end|>": 1, "<pad>": 2, **{f"t{at}": at for at in range(3, 32)}}
    said = {"model": {"type": "WordLevel", "vocab": words, "unk_token": "<pad>"}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(said))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    own = json.loads((folder / "config.json").read_text())
    own = {key: value for key, value in own.items() if not key.endswith("_token_id")}
    (folder / "config.json").write_text(json.dumps({**own, **(config or {})}))
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    model = model_of(str(folder))
    huggingface.write(tmp_path / "out", open_checkpoint(folder, model), model)
    try:
        found = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    except OSError:  # transformers then asks config.json
        found = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    return {role: getattr(found, f"{role}_token_id") for role in ("eos", "bos", "pad")}


@pytest.mark.parametrize(
    ("tokenizer", "config", "generation", "expected"),
    [
        ({"eos_token": "</s>"}, {}, None, (0, None, None)),
        ({"eos_token": "<|end|>", "bos_token": "</s>", "pad_token": "<pad>"}, {}, {"do_sample": True}, (1, 0, 2)),
        ({"eos_token": "<|end|>"}, {"eos_token_id": 0}, None, ([1, 0], None, None)),
        ({"eos_token": "</s>"}, {"eos_token_id": [0, 3]}, None, ([0, 3], 1, None)),  # the file is not written
        ({"eos_token": "</s>"}, {}, {"eos_token_id": 5}, (5, None, None)),
    ],
)
def test_transformers_is_told_which_tokens_end_an_answer(tmp_path, folder, tokenizer, config, generation, expected):
    found = written_ends(tmp_path, folder, tokenizer, config=config, generation=generation)
    assert (found["eos"], found["bos"], found["pad"]) == expected


def test_a_tokenizer_without_an_end_leaves_transformers_its_own(tmp_path, folder):
    written_ends(tmp_path, folder, {})
    assert not (tmp_path / "out" / "generation_config.json").exists()


def test_an_adapter_starts_fresh_on_published_weights_and_is_folded_in_to_be_written(tmp_path, folder):
    config = model_of("smollm2", adapter=AdapterConfig(rank=2))
    found = CheckpointWeightLoader(params_path=str(folder)).load(config)
    assert set(parameter_shapes(config)) - set(found) == {path for path in parameter_shapes(config) if "lora" in path}
    shapes, names = parameter_shapes(config), parameter_names(config)
    stored = Stored(
        where="memory",
        format="ours",
        params={names[path]: in_memory(np.ones(shape, np.float32)) for path, shape in shapes.items()},
    )
    with pytest.raises(UsageError, match=r"10 low-rank factors.*--merge-lora"):
        huggingface.write(tmp_path / "out", stored, config)


def load(folder, name="smollm2", **fields):
    return CheckpointWeightLoader(params_path=str(folder)).load(model_of(name, **fields))


def change(folder, **said):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **said}))


def test_a_shard_that_is_not_there_is_named(tmp_path):
    copy = Path(shutil.copytree(GENUINE / "llama", tmp_path / "copy"))
    (copy / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1 of the 3 files.*model-00002-of-00003\.safetensors; fetch them"):
        load(copy, "llama")


def test_an_architecture_that_is_not_known_is_named_with_those_that_are(folder):
    change(folder, model_type="qwen3_moe")
    with pytest.raises(CheckpointError, match=r"'qwen3_moe' are not known; known are llama.*closest: qwen3"):
        load(folder)


def test_a_tokenizer_with_more_tokens_than_the_table_has_rows_is_refused(folder):
    write_tokenizer(folder, 33)
    with pytest.raises(
        CheckpointError, match=r"the tokenizer has 1 tokens, from 32 on, beyond the 32 rows.*fetch both"
    ):
        load(folder)
    write_tokenizer(folder, 32, [{"id": 32, "content": "<tool>", "special": False}])
    with pytest.raises(CheckpointError, match=r"from 32 on"):
        load(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is damaged.*fetch it again"):
        load(folder)


def test_a_special_token_beyond_the_table_is_said_and_passed(folder, caplog):
    write_tokenizer(folder, 32, [{"id": 32, "content": "<image>", "special": True}])
    load(folder)
    assert "no row for '<image>'" in caplog.text


def test_sizes_that_differ_from_the_models_are_listed_with_their_flags(folder):
    change(folder, rope_parameters={"rope_type": "default", "rope_theta": 7.0})
    with pytest.raises(CheckpointError, match=r"--model\.sizes\.rope-base: it has 7\.0, the model 100000\.0"):
        load(folder)


def test_a_policy_whose_reference_has_other_sizes_is_refused_with_the_flags_of_its_own(folder):
    """Policy and reference are one model: both start from this checkpoint. So is the decoder of a reward model."""
    change(folder, rope_parameters={"rope_type": "default", "rope_theta": 7.0})
    loader, base = CheckpointWeightLoader(params_path=str(folder)), model_of("smollm2")
    for model, flag in ((ReferencedConfig(policy=base), "policy"), (RewardConfig(language=base), "language")):
        with pytest.raises(CheckpointError, match=rf"--model\.{flag}\.sizes\.rope-base: it has 7\.0, the model 100000"):
            loader.load(model)


def test_a_table_twice_is_one_where_both_are_equal(folder):
    path = folder / safetensors_file.FILE
    table = tensors("smollm2")["model.embed_tokens.weight"]
    frequencies = in_memory(np.ones(2, np.float32))
    more = {**tensors("smollm2"), "model.layers.0.self_attn.rotary_emb.inv_freq": frequencies}
    safetensors_file.write_file(path, {**more, "lm_head.weight": in_memory(table.whole())})
    for name, leaf in load(folder).items():
        np.testing.assert_array_equal(leaf.whole().astype(np.float32), loaded("smollm2")[name])
    other = in_memory((table.whole().astype(np.float32) + 1).astype(ml_dtypes.bfloat16))
    safetensors_file.write_file(path, {**more, "lm_head.weight": other})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight and model\.embed_tokens\.weight differ.*tie_word"):
        load(folder)


def test_a_head_that_is_missing_says_what_that_means(folder):
    change(folder, tie_word_embeddings=False)
    untied = dataclasses.replace(model_of("smollm2").sizes, tied=False)
    with pytest.raises(CheckpointError, match=r"(?s)missing.*lm_head\.weight.*--model\.sizes\.tied"):
        load(folder, sizes=untied)


def test_it_is_not_taken_for_a_policy_nor_a_policy_for_it(tmp_path, folder):
    with pytest.raises(CheckpointError, match=r"holds a language model \(llama\), and this is for a Pi0Config"):
        CheckpointWeightLoader(params_path=str(folder)).load(TINY.model)
    with pytest.raises(UsageError, match=r"--to huggingface writes language models; this is a Pi0Config"):
        huggingface.write(tmp_path / "out", open_checkpoint(folder), TINY.model)
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        huggingface.read_model(Place.of(tmp_path))


def test_models_with_a_language_model_in_them_start_from_its_checkpoint():
    """One whose table that scores tokens is its own: a reward model has none."""
    base = model_of("llama")
    plain = loaded("llama")
    loader = CheckpointWeightLoader(params_path=str(GENUINE / "llama"))
    assert "head" in plain
    reward = RewardConfig(language=base)
    found = loader.load(reward)
    assert found.keys() == parameter_shapes(reward).keys() - {"score/weight"}
    referenced = ReferencedConfig(policy=base)
    both = loader.load(referenced)
    assert both.keys() == parameter_shapes(referenced).keys()
    for path, leaf in plain.items():
        names = [f"policy/{path}", f"reference/{path}"]
        for part in [both[name] for name in names] + ([found[f"decoder/{path}"]] if path != "head" else []):
            np.testing.assert_array_equal(np.asarray(part.whole(), np.float32), leaf)


@pytest.mark.parametrize("kind", ["reward", "referenced"])
def test_they_start_from_their_own_checkpoints_too(kind, tmp_path):
    base = model_of("llama")
    model = RewardConfig(language=base) if kind == "reward" else ReferencedConfig(policy=base)
    drawn = {path: np.full(shape, float(index)) for index, (path, shape) in enumerate(parameter_shapes(model).items())}
    names = parameter_names(model)
    params = {names[path]: in_memory(leaf.astype(np.float32)) for path, leaf in drawn.items()}
    openpi.write(tmp_path / "own", Stored(where="here", format="openpi", params=params))
    loader = CheckpointWeightLoader(params_path=str(tmp_path / "own"))
    found = loader.load(model)
    assert {path: float(np.asarray(leaf.whole()).max()) for path, leaf in found.items()} == {
        path: float(leaf.max()) for path, leaf in drawn.items()
    }
    if kind == "referenced":  # the policy alone goes on from it without its reference
        policy = loader.load(base)
        assert policy.keys() == parameter_shapes(base).keys()
        path = "layers/mlp/down/weight"
        assert float(np.asarray(policy[path].whole()).max()) == float(drawn[f"policy/{path}"].max())
    else:
        with pytest.raises(CheckpointError, match="score/weight"):
            loader.load(base)
