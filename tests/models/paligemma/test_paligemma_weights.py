"""PaliGemma's published files, both forms: what they make of the backbone is what `transformers` computes, key by key.

`paligemma/` holds genuine files and outputs of transformers, and `make.py`, which made them.
"""

import dataclasses
import functools
import re
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from paligemma_case import CONFIG, GENUINE, OLD, TABLE, assert_same, load, loaded, published, tensors

from openpi_train.checkpoints.checkpoint_formats import open_checkpoint
from openpi_train.interop import safetensors_file
from openpi_train.interop.openpi import parameter_shapes
from openpi_train.interop.stored_leaves import in_memory
from openpi_train.models.pi0 import Pi0Config
from openpi_train.models.pi0_fast import Pi0FastConfig
from openpi_train.parallel.params import merge_module
from openpi_train.runtime.exits import CheckpointError
from openpi_train.types import Observation

HEAD = "head/"
VLA = Path(__file__).parents[2] / "interop" / "recorded" / "vla" / "best_model.pth"


def write(folder, changed) -> Path:
    folder.mkdir()
    safetensors_file.write_file(folder / safetensors_file.FILE, changed)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.slow
def test_the_backbone_computes_what_transformers_computes(dtype):
    """To 8 units in the last place of the largest value, after five layers whose sums run in another order.

    In bfloat16, where transformers rounds other intermediates, we are also no farther from float32 than it is.
    """
    with np.load(GENUINE / "io.npz") as file:
        io = dict(file)
    config = dataclasses.replace(CONFIG, dtype=dtype)
    graph = nnx.split(nnx.eval_shape(lambda: config.build(nnx.Rngs(0)).backbone))[0]
    params = {path.removeprefix("backbone/"): jnp.asarray(leaf) for path, leaf in loaded().items()}
    prompt = config.max_token_len
    seen = Observation(
        images={"base_0_rgb": jnp.asarray(io["images"])},
        image_masks={"base_0_rgb": jnp.ones(2, bool)},
        state=jnp.zeros((2, config.action_dim)),
        prompt_tokens=jnp.asarray(io["text"][:, :prompt]),
        prompt_mask=jnp.arange(prompt) < jnp.asarray(io["lengths"])[:, None],
    )
    activations, valid = jax.jit(lambda params: merge_module(graph, params)(seen))(params)
    table = params["transformer/token_embedding"].astype(dtype)
    found = {"activations": activations, "logits": activations @ table.T}
    for name, value in found.items():
        value = np.asarray(value, np.float32)[valid]
        theirs, exact = (io[f"{kind}/{name}"][valid] for kind in (dtype, "float32"))
        scale = np.abs(exact).max()
        difference = np.abs(value - theirs).max() / scale
        own, ours = (np.abs(one - exact).max() / scale for one in (theirs, value))
        print(f"{dtype} {name}: {difference:.1e} of the largest value; from float32: theirs {own:.1e}, ours {ours:.1e}")
        assert difference < 8 * jnp.finfo(dtype).eps
        assert dtype == "float32" or ours < own


NEW = ((r"^vision_tower\.", "model.vision_tower.vision_model."), (r"^language_model\.model\.", "model.language_model."))
NEW += ((r"^multi_modal", "model.multi_modal"),)


@pytest.mark.parametrize("renaming", [OLD, NEW], ids=["on the hub", "in memory"])
def test_every_set_of_names_gives_the_same_parameters(tmp_path, renaming):
    def renamed(name):
        return functools.reduce(lambda text, pair: re.sub(*pair, text), renaming, name)

    changed = {renamed(name): leaf for name, leaf in tensors().items()}
    assert sorted(changed) != sorted(tensors())
    assert_same(load(write(tmp_path / "m", changed)), loaded())


@pytest.mark.parametrize("bytes_as", ["f4", "V2", "u2"])
def test_an_npz_of_big_vision_gives_the_same_parameters(tmp_path, bytes_as):
    narrow = bytes_as != "f4"
    arrays = published(ml_dtypes.bfloat16 if narrow else np.float32)
    np.savez(tmp_path / "pt_32.npz", **{name: array.view(bytes_as) for name, array in arrays.items()})
    expected = {path: leaf.astype(ml_dtypes.bfloat16) if narrow else leaf for path, leaf in loaded().items()}
    found = load(tmp_path / "pt_32.npz")
    assert_same(found, expected)
    assert {leaf.dtype for leaf in found.values()} == {np.dtype(ml_dtypes.bfloat16 if narrow else np.float32)}


def test_the_backbone_of_the_vla_trainers_checkpoint_is_taken_and_its_head_named(tmp_path, caplog):
    caplog.set_level("INFO")
    assert_same(load(VLA), {path: leaf.astype(ml_dtypes.bfloat16) for path, leaf in loaded().items()})
    left_out = "action_head (2), device_param (1), paligemma_vlm.vision_resampler (2)"
    assert f"Left out are {left_out}: the trainer's flow head is another network" in caplog.text
    # The trainer's other name for its best, which its script in one process writes as well.
    best = tmp_path / "model_best.pth.tar"
    best.write_bytes(VLA.read_bytes())
    assert open_checkpoint(best, CONFIG).format == "vla"


@pytest.mark.parametrize("form", ["npz", "safetensors"])
def test_a_part_is_read_as_a_part(tmp_path, form):
    np.savez(tmp_path / "pt.npz", **published())
    leaves = load(tmp_path / "pt.npz" if form == "npz" else GENUINE)
    assert len(leaves) == 32
    for path, leaf in leaves.items():
        part = tuple(slice(size // 2, size) for size in leaf.shape)
        np.testing.assert_array_equal(leaf.read(part), loaded()[path][part], err_msg=path)


def test_heads_and_factors_are_left_to_the_model_and_all_else_is_wanted():
    paths = set(parameter_shapes(CONFIG))
    assert paths - set(loaded()) == {path for path in paths if path.startswith(HEAD)}
    sizes = {name: getattr(CONFIG, name) for name in ("siglip", "image_size", "vocab_size", "language")}
    pi0 = Pi0Config(
        paligemma_variant="dummy",
        action_expert_variant="dummy",
        action_expert=dataclasses.replace(CONFIG.language, lora_attention_rank=2),
        **sizes,
    )
    found = load(GENUINE, pi0)
    assert {path for path in parameter_shapes(pi0) if path not in found} == {
        path
        for path in parameter_shapes(pi0)
        if "image_encoder/" not in path and "embedding" not in path and "language" not in path
    }
    np.testing.assert_array_equal(
        found["image_encoder/head/kernel"].whole(), loaded()["backbone/image_encoder/head/kernel"]
    )


def test_rows_that_fill_up_the_vocabulary_are_left_out_and_said(tmp_path, caplog):
    table = tensors()[TABLE].whole()
    filled = in_memory(np.concatenate([table, np.full((64, table.shape[1]), 7, np.float32)]))
    caplog.set_level("INFO")
    assert_same(load(write(tmp_path / "m", {**tensors(), TABLE: filled})), loaded())
    assert re.search(r"last 64 rows of the embedding table, .*64, are left out", caplog.text)
    more = in_memory(np.concatenate([filled.whole(), table[:1]]))
    with pytest.raises(CheckpointError, match=r"--model.vocab-size"):
        load(write(tmp_path / "more", {**tensors(), TABLE: more}))


def test_logits_of_the_same_table_are_accepted_and_of_another_refused(tmp_path):
    table = tensors()[TABLE]
    assert_same(load(write(tmp_path / "tied", {**tensors(), "language_model.lm_head.weight": table})), loaded())
    other = in_memory(table.whole() + np.float32(1))
    with pytest.raises(CheckpointError, match=r"lm_head.* differ"):
        load(write(tmp_path / "two", {**tensors(), "lm_head.weight": other}))


def test_the_same_parameters_under_two_sets_of_names_are_refused(tmp_path):
    twice = {
        **tensors(),
        f"model.{TABLE}".replace("model.language_model.model", "model.language_model"): tensors()[TABLE],
    }
    with pytest.raises(CheckpointError, match=r"under several names"):
        load(write(tmp_path / "m", twice))


LAYER = "language_model.model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({LAYER: None}, "missing in the checkpoint .1.:.*layers.1.mlp.up_proj"),
        ({"language_model.model.layers.9.mlp.up_proj.weight": in_memory(np.zeros((48, 32)))}, "unknown to the model"),
        ({LAYER: in_memory(np.zeros((32, 48), np.float32))}, "of another shape .1.:.*--model.language"),
        (
            {"vision_tower.embeddings.position_embedding.weight": in_memory(np.zeros((64, 24), np.float32))},
            "images of another size: --model.image-size 224, 448 or 896",
        ),
    ],
    ids=["missing", "extra", "shape", "image size"],
)
def test_what_does_not_fit_is_named_with_what_to_do(tmp_path, change, says):
    changed = {name: leaf for name, leaf in {**tensors(), **change}.items() if leaf is not None}
    with pytest.raises(CheckpointError, match=f"(?s){says}"):
        load(write(tmp_path / "m", changed))


def test_a_damaged_npz_is_refused(tmp_path):
    arrays = published()
    whole, packed, other = tmp_path / "pt.npz", tmp_path / "packed.npz", tmp_path / "other.npz"
    np.savez(whole, **arrays)
    np.savez_compressed(packed, **arrays)
    np.savez(other, weights=np.zeros(3))
    content = whole.read_bytes()
    whole.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"is damaged.*fetch it again"):
        load(whole)
    with pytest.raises(CheckpointError, match=r"compressed.*numpy\.savez"):
        load(packed)
    with pytest.raises(CheckpointError, match=r"not in big_vision's format.*params/"):
        load(other)
    with pytest.raises(CheckpointError, match=r"copy it to one that all hosts share"):
        load("gs://bucket/pt_224.npz")
    missing = {name: array for name, array in arrays.items() if "final_norm" not in name}
    np.savez(whole, **missing)
    with pytest.raises(CheckpointError, match=r"(?s)missing in the checkpoint .1.:.*PaliGemma/llm/final_norm/scale"):
        load(whole)


def test_a_shard_that_is_not_there_is_named(tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    for file in GENUINE.glob("model*"):
        if "00002" not in file.name:
            (folder / file.name).write_bytes(file.read_bytes())
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003.safetensors"):
        open_checkpoint(folder, CONFIG)
    torn = folder / "model-00002-of-00003.safetensors"
    torn.write_bytes(struct.pack("<Q", 2) + b"{}")
    with pytest.raises(CheckpointError, match=r"not of one save|lacks"):
        open_checkpoint(folder, CONFIG)


@pytest.mark.slow
def test_tokens_that_come_one_by_one_are_scored_as_transformers_scores_them():
    with np.load(GENUINE / "io.npz") as file:
        io = dict(file)
    sizes = {
        name: getattr(CONFIG, name) for name in ("siglip", "image_size", "vocab_size", "language", "dtype", "remat")
    }
    slots = ("base_0_rgb",)
    config = Pi0FastConfig(paligemma_variant="dummy", camera_slots=slots, max_token_len=io["text"].shape[1], **sizes)
    graph = nnx.split(nnx.eval_shape(lambda: config.build(nnx.Rngs(0))))[0]
    params = {path: jnp.asarray(leaf.whole()) for path, leaf in load(GENUINE, config).items()}
    assert set(params) == set(parameter_shapes(config))
    given, length = CONFIG.max_token_len, config.max_token_len
    seen = Observation(
        images={slot: jnp.asarray(io["images"]) for slot in slots},
        image_masks={slot: jnp.ones(2, bool) for slot in slots},
        state=jnp.zeros((2, config.action_dim)),
        prompt_tokens=jnp.asarray(io["text"]),
        prompt_mask=jnp.ones((2, length), bool),
        token_ar_mask=jnp.broadcast_to(jnp.arange(length) >= given, (2, length)),
        token_loss_mask=jnp.ones((2, length), bool),
    )
    found = np.asarray(jax.jit(lambda params: merge_module(graph, params).logits(seen))(params))
    expected = io["float32/logits_with_suffix"][:, -length:-1]
    difference = np.abs(found - expected).max() / np.abs(expected).max()
    print(f"float32 logits with a suffix: {difference:.1e} of the largest value")
    assert difference < 8 * jnp.finfo("float32").eps
    # That the suffix does not see what follows is part of it: its last token changes no score before it.
    assert np.abs(found[:, given:] - io["float32/logits"][:, -1:]).max() > 0.1
