"""openpi's checkpoint directories: read in parts, written as its own reader expects them, from a bucket too."""

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from bucket import bucket
from golden_case import GOLDEN, golden_config, read_meta, read_npz

from openpi_train.interop import openpi
from openpi_train.interop.formats import model_params, open_checkpoint
from openpi_train.interop.stored import Stored
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
        np.testing.assert_array_equal(leaf.whole(), expected[config.public_name(path)])
    assert list(stored.norm_stats) == ([] if "pure" in directory else ["golden_robot"])


def test_a_part_of_a_leaf_is_read_by_its_index(golden, expected):
    name = "PaliGemma/llm/embedder/input_embedding"
    leaf = open_checkpoint(golden / "openpi_checkpoint/5").params[name]
    part = (slice(3, 9), slice(2, 5))
    np.testing.assert_array_equal(leaf.read(part), expected[name][part])


def test_a_bucket_is_read_as_a_disk_is(golden, expected, tmp_path, monkeypatch):
    with bucket(golden, monkeypatch) as requests:
        stored = open_checkpoint("gs://bucket/openpi_checkpoint/5/")
        assert stored.norm_stats == open_checkpoint(golden / "openpi_checkpoint/5").norm_stats
        for name, leaf in stored.params.items():
            np.testing.assert_array_equal(leaf.whole(), expected[name])
        assert any("bytes=" in (wanted or "") for _, wanted in requests), "whole files were fetched"
        with pytest.raises(CheckpointError, match="no checkpoint at gs://bucket/other"):
            open_checkpoint("gs://bucket/other")


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


def test_bfloat16_parameters_stay_so_on_disk(golden, tmp_path):
    leaf = open_checkpoint(golden / "openpi_checkpoint/5").params["state_proj/kernel"]
    openpi.write(tmp_path, Stored(where="", format="", params={"state_proj/kernel": leaf.cast(ml_dtypes.bfloat16)}))
    again = open_checkpoint(tmp_path).params["state_proj/kernel"]
    assert again.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(again.whole(), leaf.whole().astype(ml_dtypes.bfloat16))
