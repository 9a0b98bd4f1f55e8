"""PaliGemma's published forms, as we write them: the genuine files again, in any type, and what `convert` says of it.

The genuine files are those of transformers in `paligemma/`; numpy is who else reads an `.npz`.
"""

import json
import re
import types
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from exchanged import LORA, TINY, made_up, tiny, write
from paligemma_case import CONFIG, GENUINE, OLD, TABLE, assert_same, load, loaded, published, tensors

from openpi_train.checkpoints.checkpoint_formats import named, open_checkpoint
from openpi_train.interop import safetensors_file
from openpi_train.interop.place import Place
from openpi_train.interop.stored_leaves import Stored, StoredLeaf, common, in_memory
from openpi_train.models.paligemma.paligemma_torch import num_rows, published_config, with_filling
from openpi_train.runtime.exits import UsageError
from openpi_train.tools.convert_checkpoint import plan
from openpi_train.tools.requests import ConvertRequest

FORMS = ["paligemma", "big_vision"]
INDEX, CONFIG_FILE = safetensors_file.INDEX, "config.json"
# The published config.json of google/paligemma-3b-pt-224, without versions and types.
PUBLISHED = {
    "architectures": ["PaliGemmaForConditionalGeneration"],
    "bos_token_id": 2,
    "eos_token_id": 1,
    "hidden_size": 2048,
    "ignore_index": -100,
    "image_token_index": 257152,
    "model_type": "paligemma",
    "pad_token_id": 0,
    "projection_dim": 2048,
}
PUBLISHED_TEXT = {
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "model_type": "gemma",
    "num_attention_heads": 8,
    "num_hidden_layers": 18,
    "num_image_tokens": 256,
    "num_key_value_heads": 1,
    "vocab_size": 257216,
}
PUBLISHED_VISION = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "model_type": "siglip_vision_model",
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "num_image_tokens": 256,
    "patch_size": 14,
    "projection_dim": 2048,
    "projector_hidden_act": "gelu_fast",
    "vision_use_head": False,
}


def checkpoint(dtype=np.float32) -> Stored:
    """The genuine backbone as a checkpoint of ours."""
    leaves = {CONFIG.param_rules.public_name(path): in_memory(leaf.astype(dtype)) for path, leaf in loaded().items()}
    return Stored(where="memory", format="ours", params=leaves)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16], ids=["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_written_is_read_again_with_the_same_bits(tmp_path, form, dtype):
    named(form).write(tmp_path / "out", checkpoint(dtype), CONFIG)
    assert open_checkpoint(tmp_path / "out", CONFIG).format == form
    found = load(tmp_path / "out")
    assert {leaf.dtype for leaf in found.values()} == {np.dtype(dtype)}
    assert_same(found, {path: leaf.astype(dtype) for path, leaf in loaded().items()})


def test_a_written_folder_has_the_published_names_and_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_file, "SHARD_BYTES", 60_000)  # as the genuine ones
    out = tmp_path / "out"
    named("paligemma").write(out, checkpoint(), CONFIG)
    written = dict(safetensors_file.open_model(Place.of(out)))
    genuine = {re.sub(*OLD[0], name): leaf for name, leaf in tensors().items()}
    assert written.keys() == genuine.keys()
    table, theirs = written.pop(TABLE).whole(), genuine.pop(TABLE).whole()
    for name, leaf in written.items():
        assert leaf.shape == genuine[name].shape
        np.testing.assert_array_equal(leaf.whole(), genuine[name].whole(), err_msg=name)
    # The published table has a row for the image, and is filled to a multiple of 64.
    assert table.shape == (128, 32)
    np.testing.assert_array_equal(table[:64], theirs)
    index, its_index = (json.loads((folder / INDEX).read_text()) for folder in (out, GENUINE))
    assert index.keys() == its_index.keys()
    assert index["metadata"]["total_size"] == its_index["metadata"]["total_size"] + theirs.nbytes
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 2 and sorted(set(index["weight_map"].values())) == files
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"


def test_a_written_config_says_the_sizes_that_transformers_says(tmp_path):
    named("paligemma").write(tmp_path / "out", checkpoint(), CONFIG)
    ours, theirs = (json.loads((folder / CONFIG_FILE).read_text()) for folder in (tmp_path / "out", GENUINE))
    assert ours["image_token_index"] == 64 and ours["text_config"]["vocab_size"] == 128
    theirs["image_token_index"], theirs["text_config"]["vocab_size"] = 64, 128  # one in the vocabulary is given there
    sections = ("text_config", "vision_config")
    told = {"": PUBLISHED, "text_config": PUBLISHED_TEXT, "vision_config": PUBLISHED_VISION}
    for section, names in told.items():
        mine, its = (one[section] if section else one for one in (ours, theirs))
        assert names.keys() <= mine.keys()
        shared = mine.keys() & its.keys() - set(sections)
        assert {name: mine[name] for name in shared} == {name: its[name] for name in shared}
        sizes = {name for name in its if "size" in name or "num_" in name}
        assert sizes - mine.keys() <= {"vocab_size", "num_channels"}
    assert ours["text_config"]["head_dim"] == theirs["text_config"]["head_dim"]


def test_the_config_of_the_published_sizes_is_the_published_one(golden_file):
    shapes = json.loads(golden_file("param_shapes_pi0_fast.json").read_text())["params"]
    leaves = {
        name: types.SimpleNamespace(shape=tuple(entry["shape"]), dtype=np.dtype(entry["dtype"]))
        for name, entry in shapes.items()
    }
    config = published_config(leaves)  # type: ignore[arg-type]
    assert {name: config[name] for name in PUBLISHED} == PUBLISHED
    assert {name: config["text_config"][name] for name in PUBLISHED_TEXT} == PUBLISHED_TEXT
    assert {name: config["vision_config"][name] for name in PUBLISHED_VISION} == PUBLISHED_VISION
    assert config["torch_dtype"] == "float32" and config["vision_config"]["image_size"] == 224


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def test_numpy_reads_a_written_npz_under_big_visions_names(tmp_path, dtype):
    named("big_vision").write(tmp_path / "out", checkpoint(dtype), CONFIG)
    expected = published(dtype)
    with np.load(tmp_path / "out" / "paligemma.npz") as file:
        found = dict(file)
    assert found.keys() == expected.keys()
    for name, array in found.items():
        # numpy has no bfloat16: two untyped bytes, as big_vision publishes and takes them.
        assert array.dtype == (np.dtype("V2") if dtype is ml_dtypes.bfloat16 else np.dtype("f4"))
        np.testing.assert_array_equal(array.view(dtype), expected[name], err_msg=name)


def test_rows_that_are_added_to_the_table_are_its_mean_in_every_part():
    assert [num_rows(size) for size in (257_152, 64, 63, 32)] == [257_216, 128, 64, 64]
    values = np.random.default_rng(0).normal(size=(10, 4)).astype(np.float32)
    boxes = [(slice(0, 7), slice(0, 4)), (slice(7, 10), slice(0, 4))]
    chunked = StoredLeaf.streamed(
        values.shape,
        values.dtype,
        (7, 4),
        lambda index: ((part, values[part]) for box in boxes if (part := common(index, box))),
    )
    mean = values.astype(np.float64).mean(0).astype(np.float32)
    expected = np.concatenate([values, np.tile(mean, (54, 1))])
    for table in (in_memory(values), chunked):
        filled = with_filling(table)
        np.testing.assert_array_equal(filled.whole(), expected)
        for part in [(slice(8, 30), slice(1, 3)), (slice(0, 3), slice(0, 4)), (slice(12, 64), slice(2, 4))]:
            np.testing.assert_array_equal(filled.read(part), expected[part])
        for where, piece in filled.pieces():
            np.testing.assert_array_equal(piece, expected[where])


def converted(target: Path, form: str, experiment=TINY, **flags):
    """A plan of a tiny pi0's conversion, and its parameters."""
    params = made_up(experiment)
    source = write(target.parent / "5", params)
    request = ConvertRequest(source=str(source), target=target, target_format=form, outputs=False, **flags)
    return plan(request, experiment), params


@pytest.mark.parametrize("form", FORMS)
def test_pi0s_paligemma_is_written_and_all_else_is_named(tmp_path, form):
    planned, params = converted(tmp_path / "out", form)
    action = {name for name in params if name.startswith("PaliGemma/llm/") and "_1/" in name}
    backbone = {name for name in params if name.startswith("PaliGemma/")} - action
    assert action
    said = planned.summary()
    assert f"to {tmp_path / 'out'} ({form}): {len(backbone)} parameters" in said
    assert "left out: the norm stats of robot" in said
    assert f"left out: {len(params) - len(backbone)} parameters that --to {form} does not hold" in said
    report = json.loads((planned.run() / "parity.json").read_text())
    assert report["parameters_left_out"] == sorted(params.keys() - backbone)
    assert report["norm_stats_left_out"] == ["robot"] and report["norm_stats"] == []
    found = load(tmp_path / "out", TINY.model)
    assert {TINY.model.param_rules.public_name(path) for path in found} == backbone
    for path, leaf in found.items():
        np.testing.assert_array_equal(leaf.whole(), params[TINY.model.param_rules.public_name(path)], err_msg=path)


@pytest.mark.slow
def test_low_rank_factors_are_merged_or_refused(tmp_path):
    experiment = tiny(language=LORA)
    planned, params = converted(tmp_path / "out", "paligemma", experiment, merge_lora=True)
    planned.run()
    found = load(tmp_path / "out", experiment.model.without_lora())
    name = "PaliGemma/llm/layers/mlp/linear"
    merged = next(
        leaf for path, leaf in found.items() if experiment.model.param_rules.public_name(path) == name
    ).whole()
    assert merged.shape == params[name].shape and np.abs(merged - params[name]).max() > 1e-3
    for form in FORMS:
        with pytest.raises(UsageError, match="fold them in with --merge-lora"):
            plan(
                ConvertRequest(source=str(tmp_path / "5"), target=tmp_path / form, target_format=form, outputs=False),
                experiment,
            ).run()
        assert not (tmp_path / form).exists()


@pytest.mark.parametrize("form", FORMS)
def test_a_model_without_a_paligemma_and_a_file_as_target_are_refused(tmp_path, form):
    others = Stored(where="memory", format="ours", params={"backbone/conv": in_memory(np.zeros(2, np.float32))})
    with pytest.raises(UsageError, match="has no PaliGemma in it"):
        named(form).write(tmp_path / "out", others, None)
    with pytest.raises(UsageError, match=r"a result is a folder, in which --to big_vision writes paligemma\.npz"):
        converted(tmp_path / "pt_224.npz", form)
