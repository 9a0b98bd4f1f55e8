"""openpi's checkpoint directories: read in parts, written as its own reader expects them, from a bucket too."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from bucket import bucket
from golden_case import GOLDEN, golden_config, read_meta, read_npz

from openpi_train.checkpoints import checkpoint_formats
from openpi_train.checkpoints.checkpoint_formats import model_params, open_checkpoint
from openpi_train.interop import native_format, openpi
from openpi_train.interop.place import Place
from openpi_train.interop.stored_leaves import Stored, in_memory
from openpi_train.models.act import ActConfig
from openpi_train.parallel.params import nested_params
from openpi_train.runtime.exits import CheckpointError


@pytest.fixture(scope="module")
def config(golden):
    meta = read_meta()
    if not (golden / "openpi_checkpoint").is_dir() or "pi0_f32" not in meta["cases"]:
        pytest.skip(f"no openpi_checkpoint, or no case pi0_f32 that describes it, in {golden}")
    return golden_config(meta, meta["cases"]["pi0_f32"])


@pytest.fixture(scope="module")
def expected(config):
    return read_npz(GOLDEN / "openpi_checkpoint_expected.npz")


@pytest.mark.parametrize(
    "directory", ["openpi_checkpoint/5", "openpi_checkpoint/5/params", "openpi_checkpoint_pure_params"]
)
def test_golden_checkpoints_load_as_recorded(golden, config, expected, directory):
    stored = open_checkpoint(golden / directory, config)
    assert stored.format == "openpi"
    params = model_params(stored, config)
    assert params.keys() == openpi.parameter_shapes(config).keys()
    assert len(params) == len(expected)
    for path, leaf in params.items():
        assert leaf.dtype == np.float32
        np.testing.assert_array_equal(leaf.whole(), expected[config.param_rules.public_name(path)])
    assert list(stored.norm_stats) == ([] if "pure" in directory else ["golden_robot"])


def test_a_part_of_a_leaf_is_read_by_its_index(golden, expected):
    name = "PaliGemma/llm/embedder/input_embedding"
    leaf = open_checkpoint(golden / "openpi_checkpoint/5").params[name]
    part = (slice(3, 9), slice(2, 5))
    np.testing.assert_array_equal(leaf.read(part), expected[name][part])


@pytest.mark.slow
def test_a_bucket_is_read_as_a_disk_is(golden, expected, tmp_path, monkeypatch):
    with bucket(golden, monkeypatch) as requests:
        stored = open_checkpoint("gs://bucket/openpi_checkpoint/5/")
        assert stored.norm_stats == open_checkpoint(golden / "openpi_checkpoint/5").norm_stats
        for name, leaf in stored.params.items():
            np.testing.assert_array_equal(leaf.whole(), expected[name])
        assert any("bytes=" in (wanted or "") for _, wanted in requests), "whole files were fetched"
        with pytest.raises(CheckpointError, match="no checkpoint at gs://bucket/other"):
            open_checkpoint("gs://bucket/other")


def test_norm_stats_are_found_by_asset_ids_with_a_slash(tmp_path):
    stats = {"robot": {"norm_stats": {"state": 1}}, "lab/arm": {"norm_stats": {"state": 2}}}
    openpi.write_norm_stats(tmp_path, stats)
    (tmp_path / "assets" / "notes.txt").touch()
    assert openpi.read_norm_stats(Place.of(tmp_path)) == stats


def test_what_is_written_is_what_openpis_own_reader_reads(golden, expected, tmp_path):
    stored = open_checkpoint(golden / "openpi_checkpoint/5")
    openpi.write(tmp_path / "7", stored)
    with ocp.PyTreeCheckpointer() as reader:  # as openpi's `restore_params` asks
        metadata = reader.metadata(tmp_path / "7" / "params").item_metadata
        item = {"params": metadata["params"]}
        arguments = jax.tree.map(lambda _: ocp.ArrayRestoreArgs(restore_type=np.ndarray), item)
        tree = reader.restore(tmp_path / "7" / "params", ocp.args.PyTreeRestore(item=item, restore_args=arguments))
    found = jax.tree_util.tree_flatten_with_path(tree["params"])[0]
    assert len(found) == len(expected)
    for path, value in found:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        assert name.endswith("/value")
        np.testing.assert_array_equal(value, expected[name.removesuffix("/value")])
    assert open_checkpoint(tmp_path / "7").norm_stats == stored.norm_stats


def test_a_warning_says_that_openpi_has_no_such_model(golden, config, caplog):
    stored = open_checkpoint(golden / "openpi_checkpoint/5")
    form = checkpoint_formats.named("openpi")
    assert form.prepare is not None
    form.prepare(stored, config)
    assert not caplog.text
    form.prepare(stored, ActConfig(action_dim=4, state_dim=4, cameras=("base_0_rgb",)))
    assert re.search(r"openpi has no model .*ActConfig", caplog.text)


def test_bfloat16_parameters_stay_so_on_disk(golden, tmp_path):
    leaf = open_checkpoint(golden / "openpi_checkpoint/5").params["state_proj/kernel"]
    openpi.write(tmp_path, Stored(where="", format="", params={"state_proj/kernel": leaf.cast(ml_dtypes.bfloat16)}))
    again = open_checkpoint(tmp_path).params["state_proj/kernel"]
    assert again.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(again.whole(), leaf.whole().astype(ml_dtypes.bfloat16))


@pytest.fixture(scope="module")
def trained(golden, config):
    """The golden checkpoint with the training state that openpi's trainer would save beside it, values made up."""
    stored = open_checkpoint(golden / "openpi_checkpoint/5")
    rng = np.random.default_rng(0)
    made_up = {name: rng.normal(size=leaf.shape).astype(np.float32) for name, leaf in stored.params.items()}
    moments = {
        f"opt_state/1/0/{kind}/{name}": value + at
        for at, kind in enumerate(("mu", "nu"))
        for name, value in made_up.items()
    }
    counts = {name: np.int32(5) for name in ("step", "opt_state/1/0/count", "opt_state/1/2/count")}
    state = {**counts, **moments, **{f"params/{name}": value - 1 for name, value in made_up.items()}}
    assert len(state) == read_meta()["openpi_checkpoint"]["train_state_leaves"]
    return dataclasses.replace(stored, train_state={name: in_memory(value) for name, value in state.items()})


def same_leaves(one, other):
    assert one.keys() == other.keys()
    for name, leaf in one.items():
        assert leaf.dtype == other[name].dtype
        np.testing.assert_array_equal(leaf.whole(), other[name].whole(), err_msg=name)


def openpis_train_state(names):
    """The tree of shapes that openpi's trainer asks Orbax for, its optimizer's state being optax's own."""

    def tree():
        params = nested_params({f"{name}/value": jnp.zeros(1) for name in names})
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.constant_schedule(1e-3)))
        return {"step": 0, "params": params, "opt_state": optimizer.init(params), "ema_params": None}

    return jax.eval_shape(tree)


@pytest.mark.slow
def test_a_training_state_goes_from_openpi_to_ours_and_back_bit_for_bit(trained, config, tmp_path):
    openpi.write(tmp_path / "5", trained)
    first = open_checkpoint(tmp_path / "5", config)
    same_leaves(first.params, trained.params)
    same_leaves(first.train_state, trained.train_state)
    native_format.write(tmp_path / "ours", first, config)
    between = open_checkpoint(tmp_path / "ours", config)
    assert between.format == "ours"
    openpi.write(tmp_path / "again", between)
    again = open_checkpoint(tmp_path / "again")
    assert again.format == "openpi" and again.norm_stats == trained.norm_stats
    same_leaves(again.params, trained.params)
    same_leaves(again.train_state, trained.train_state)


def test_openpis_trainer_resumes_from_what_is_written(trained, tmp_path):
    openpi.write(tmp_path / "5", trained)
    wanted = openpis_train_state(trained.params)
    items = {"train_state": ocp.PyTreeCheckpointHandler(), "params": ocp.PyTreeCheckpointHandler()}
    with ocp.CheckpointManager(
        tmp_path, item_handlers=items, options=ocp.CheckpointManagerOptions(create=False)
    ) as manager:
        assert manager.latest_step() == 5
        restored = manager.restore(5, items={"train_state": wanted, "params": {"params": wanted["params"]}})
    assert jax.tree.structure(restored["train_state"]) == jax.tree.structure(wanted)
    adam = restored["train_state"]["opt_state"][1][0]
    name = "action_in_proj/kernel"
    for found, leaf in (
        (adam.nu, trained.train_state[f"opt_state/1/0/nu/{name}"]),
        (restored["train_state"]["params"], trained.train_state[f"params/{name}"]),
        (restored["params"]["params"], trained.params[name]),
    ):
        np.testing.assert_array_equal(found["action_in_proj"]["kernel"]["value"], leaf.whole())
    assert int(adam.count) == int(restored["train_state"]["step"]) == 5
