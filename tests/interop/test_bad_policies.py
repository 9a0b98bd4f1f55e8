"""Bad files of PyTorch's models: each is refused with what is wrong, where, and what to do."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from exchanged import LORA, TINY, as_stored, made_up, tiny

from openpi_train.checkpoints import lerobot_policy
from openpi_train.checkpoints.checkpoint_formats import model_params, open_checkpoint
from openpi_train.checkpoints.weights import CheckpointWeightLoader
from openpi_train.interop import openpi_torch
from openpi_train.interop.openpi import parameter_names
from openpi_train.interop.openpi_torch import settle_heads
from openpi_train.interop.place import Place
from openpi_train.interop.safetensors_file import FILE, INDEX, open_model, write_file
from openpi_train.interop.stored_leaves import in_memory, place
from openpi_train.interop.torch_names import EMBEDDING, TIED_HEAD
from openpi_train.models.pi0_fast import Pi0FastConfig
from openpi_train.runtime.exits import CheckpointError, UsageError

MODEL = TINY.model
KEY = "action_in_proj.weight"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policies") / "good"
    lerobot_policy.write(folder, as_stored(made_up()), MODEL)
    return folder


@pytest.fixture
def folder(good, tmp_path):
    """A copy to spoil."""
    return shutil.copytree(good, tmp_path / "policy")


def refused(folder, model=MODEL) -> str:
    with pytest.raises((CheckpointError, UsageError)) as error:
        model_params(open_checkpoint(folder, model), model)
    assert str(folder) in str(error.value)
    return str(error.value)


def changed(folder, change) -> None:
    """Write the folder's tensors again with `change` made to them."""
    tensors = {name: in_memory(leaf.whole().copy()) for name, leaf in open_model(Place.of(folder)).items()}
    change(tensors)
    write_file(folder / FILE, tensors)


def configured(folder, **fields) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def in_two_files(folder) -> None:
    tensors = dict(open_model(Place.of(folder)))
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in parts.items():
        write_file(folder / file, {name: in_memory(tensors[name].whole().copy()) for name in held})
    weight_map = {name: file for file, held in parts.items() for name in held}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / FILE).unlink()


def test_the_good_one_is_taken_in_one_file_and_in_several(folder):
    whole = {path: leaf.whole() for path, leaf in model_params(open_checkpoint(folder, MODEL), MODEL).items()}
    in_two_files(folder)
    for path, leaf in model_params(open_checkpoint(folder, MODEL), MODEL).items():
        np.testing.assert_array_equal(leaf.whole(), whole[path])


def test_a_run_takes_its_first_parameters_from_a_policys_folder(folder):
    loader = CheckpointWeightLoader(params_path=str(folder))
    experiment = dataclasses.replace(TINY, weight_loader=loader)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    expected, names = made_up(), parameter_names(MODEL)
    for path, leaf in experiment.weight_loader.load(MODEL).items():
        placed = place(leaf, np.float32, sharding)
        np.testing.assert_array_equal(placed, expected[names[path]])


def test_a_missing_tensor_is_named_with_the_closest(folder):
    changed(folder, lambda tensors: tensors.update({"model.action_in_projection.weight": tensors.pop(f"model.{KEY}")}))
    message = refused(folder)
    assert (
        f"missing in the checkpoint (1):\n  {KEY} (closest in the checkpoint: action_in_projection.weight)" in message
    )
    assert "unknown to the model (1):\n  action_in_projection.weight" in message


def test_a_tensor_of_another_shape_says_which_flags(folder):
    changed(folder, lambda tensors: tensors.update({f"model.{KEY}": in_memory(np.zeros((9, 7), np.float32))}))
    message = refused(folder)
    assert f"{KEY} is (9, 7), the model wants (8, 7)" in message and "--model.action-expert" in message


def test_norm_stats_among_the_tensors_are_unknown(folder):
    stats = {"normalize_inputs.buffer_observation_state.mean": in_memory(np.zeros(7, np.float32))}
    changed(folder, lambda tensors: tensors.update(stats))
    assert "migrate_policy_normalization" in refused(folder)


def test_integers_are_no_parameters(folder):
    header = {"x": {"dtype": "I32", "shape": [1], "data_offsets": [0, 4]}}
    text = json.dumps(header).encode()
    (folder / FILE).write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 4)
    assert "x is of type I32" in refused(folder)


@pytest.mark.parametrize("left", [4, 200, -1])
def test_a_torn_file_says_so(folder, left):
    content = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(content[:left])
    assert {4: "its first bytes are lost", 200: "is truncated", -1: "is truncated"}[left] in refused(folder)


def test_a_pointer_of_git_lfs_is_no_file(folder):
    (folder / FILE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 14\n")
    assert "Git LFS pointer" in refused(folder)


def test_an_index_whose_files_are_not_there(folder):
    in_two_files(folder)
    (folder / "b.safetensors").unlink()
    assert "1 of the 2 files" in refused(folder) and "b.safetensors" in refused(folder)


def test_files_of_two_saves_are_refused(folder):
    in_two_files(folder)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][f"model.{KEY}"] = next(
        file for file in ("a.safetensors", "b.safetensors") if file != index["weight_map"][f"model.{KEY}"]
    )
    (folder / INDEX).write_text(json.dumps(index))
    assert "not of one save" in refused(folder)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"type": "pi05"}, "'pi05' and the model is 'pi0'"),
        ({"type": "act"}, "'act' and the model is 'pi0': give an experiment of act"),
        ({"type": "vqbet"}, "allowed: pi0, pi05, pi0_fast, act"),
        ({"use_peft": True}, "merge them into the base policy"),
        ({"min_period": 1.0}, "min_period is 1.0"),
        ({"use_visual_memory": True}, "use_visual_memory"),
        ({"max_action_dim": 32}, "--model.action-dim 32"),
        ({"image_resolution": [64, 64]}, "--model.image-size 64"),
    ],
)
def test_a_policy_of_another_kind_is_refused(folder, fields, said):
    configured(folder, **fields)
    assert said in refused(folder)


def test_another_chunk_or_normalisation_is_taken_and_said(folder, caplog):
    configured(folder, chunk_size=50, normalization_mapping={"STATE": "MIN_MAX", "ACTION": "MEAN_STD"})
    open_checkpoint(folder, MODEL)
    assert "chunks of 50 steps" in caplog.text and "MIN_MAX" in caplog.text


def test_a_fast_processor_of_ones_own_is_named_in_the_policy(tmp_path, caplog):
    sizes = {name: getattr(MODEL, name) for name in ("language", "siglip", "image_size", "action_dim", "vocab_size")}
    model = Pi0FastConfig(paligemma_variant="dummy", fast_tokenizer="/mine/fast", **sizes)
    params = made_up(dataclasses.replace(tiny(), model=model))
    lerobot_policy.write(tmp_path / "out", as_stored(params), model)
    assert json.loads((tmp_path / "out/config.json").read_text())["action_tokenizer_name"] == "/mine/fast"
    assert "FAST processor at /mine/fast" in caplog.text
    caplog.clear()
    open_checkpoint(tmp_path / "out", model)
    assert "FAST processor" not in caplog.text
    open_checkpoint(tmp_path / "out", dataclasses.replace(model, fast_tokenizer="/other/fast"))
    assert "has the FAST processor /mine/fast, the model here /other/fast" in caplog.text


def test_a_config_that_is_no_json(folder):
    (folder / "config.json").write_text("{")
    assert "is not JSON" in refused(folder)


def test_a_processor_whose_stats_are_missing(folder):
    next(folder.glob("policy_preprocessor_step*")).unlink()
    assert "normalizer_processor.safetensors" in refused(folder)


def test_without_a_model_an_experiment_is_asked_for(folder):
    with pytest.raises(UsageError, match="--experiment NAME"):
        open_checkpoint(folder)


@pytest.mark.parametrize("form", [lerobot_policy, openpi_torch])
def test_low_rank_factors_must_be_merged_before_they_are_written(form):
    experiment = tiny(language=LORA)
    with pytest.raises(UsageError, match="--merge-lora"):
        form.prepare(as_stored(made_up(experiment)), experiment.model)


def test_norm_stats_of_two_datasets_have_no_place_in_a_policy(tmp_path):
    stored = as_stored(made_up())
    stats = {**stored.norm_stats, "other": stored.norm_stats["robot"]}
    with pytest.raises(UsageError, match="robot, other"):
        lerobot_policy.write(tmp_path / "out", dataclasses.replace(stored, norm_stats=stats), MODEL)


def test_two_embeddings_are_one_only_where_they_are_equal():
    one, other = in_memory(np.ones((4, 2))), in_memory(np.arange(8.0).reshape(4, 2))
    for speaks, head, fine in ((True, one, True), (True, other, False), (False, other, True)):
        found = {EMBEDDING: one, TIED_HEAD: head}
        if not fine:
            with pytest.raises(CheckpointError, match="differ"):
                settle_heads(Place("somewhere"), found, speaks=speaks)
            continue
        settle_heads(Place("somewhere"), found, speaks=speaks)
        assert found.keys() == {TIED_HEAD} and found[TIED_HEAD] is one


def test_two_embeddings_that_differ_far_down_are_two():
    values = np.ones((10_000, 2), np.float32)
    other = values.copy()
    other[-1, -1] = 2
    with pytest.raises(CheckpointError, match="differ"):
        settle_heads(Place("somewhere"), {EMBEDDING: in_memory(values), TIED_HEAD: in_memory(other)}, speaks=True)
