"""openpi's checkpoint directories: read, written, and refused where they do not fit."""

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from golden_case import GOLDEN, golden_config, read_meta, read_npz

from openpi_train.interop import openpi
from openpi_train.nn.gemma_sizes import GemmaOverrides


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
    params = openpi.load_params(golden / directory, config)
    assert params.keys() == openpi.parameter_shapes(config).keys()
    assert len(params) == len(expected)
    for path, value in params.items():
        assert value.dtype == np.float32
        np.testing.assert_array_equal(value, expected[config.public_name(path)])


@pytest.fixture(scope="module")
def params(golden, config):
    return openpi.load_params(golden / "openpi_checkpoint/5", config)


def test_written_parameters_come_back_from_where_openpi_reads_them(config, params, tmp_path):
    item = openpi.save_params(tmp_path / "7", params, config.public_name)
    assert item == tmp_path / "7" / "params"
    again = openpi.load_params(tmp_path / "7", config)
    assert again.keys() == params.keys()
    for path, value in params.items():
        np.testing.assert_array_equal(again[path], value)
    with pytest.raises(FileExistsError, match="exists already"):
        openpi.save_params(tmp_path / "7", params, config.public_name)


def test_bfloat16_parameters_load_as_float32(config, params, tmp_path):
    half = {path: value.astype(ml_dtypes.bfloat16) for path, value in params.items()}
    openpi.save_params(tmp_path, half, config.public_name)
    for path, value in openpi.load_params(tmp_path, config).items():
        assert value.dtype == np.float32
        np.testing.assert_array_equal(value, half[path].astype(np.float32))


def test_every_difference_is_named_with_the_closest_match(config, params, tmp_path):
    changed = dict(params)
    changed["state_projection/kernel"] = changed.pop("state_proj/kernel")
    changed["action_in_proj/bias"] = np.zeros(3, np.float32)
    openpi.save_params(tmp_path, changed, config.public_name)
    with pytest.raises(ValueError) as error:
        openpi.load_params(tmp_path, config)
    message = str(error.value)
    assert (
        "missing in the checkpoint (1):\n  state_proj/kernel (closest in the checkpoint: state_projection/kernel)"
        in message
    )
    assert "unknown to the model (1):\n  state_projection/kernel" in message
    assert "action_in_proj/bias is (3,), the model wants (64,)" in message


def test_only_the_allowed_parameters_may_be_missing(golden, config, params):
    adapters = GemmaOverrides(**{**vars(config.language), "lora_attention_rank": 2, "lora_mlp_rank": 2})
    with_lora = dataclasses.replace(config, language=adapters)
    with pytest.raises(ValueError, match=r"missing in the checkpoint \(10\)[\s\S]*and 2 more"):
        openpi.load_params(golden / "openpi_checkpoint/5", with_lora)
    loaded = openpi.load_params(golden / "openpi_checkpoint/5", with_lora, allow_missing=r".*lora.*")
    assert loaded.keys() == params.keys()


def test_a_directory_without_a_checkpoint_says_what_was_looked_for(config, tmp_path):
    with pytest.raises(FileNotFoundError, match="neither it nor its `params` folder"):
        openpi.load_params(tmp_path, config)


def test_two_parameters_of_one_name_are_refused(tmp_path):
    with pytest.raises(ValueError, match="2 parameters are published under 1 names"):
        openpi.save_params(tmp_path, {"a": jnp.zeros(1), "b": jnp.zeros(1)}, lambda _: "same")
