"""Checkpoints of diffusion_policy's trainer: what is read computes what it recorded, and is written as it was."""

import dataclasses

import numpy as np
import pytest
from lerobot_recorded import Recorded
from openpi_train_configs.robot_dp import pusht_flow, robot_dp_14
from recorded_diffusion import batch_of, computed, config_of, objective_of

from openpi_train.checkpoints.checkpoint_formats import named, open_checkpoint
from openpi_train.data.robot.normalize import normalize, parse_norm_stats, unnormalize
from openpi_train.fields import as_json
from openpi_train.interop.stored_leaves import Stored, in_memory
from openpi_train.interop.torch_file import open_payload
from openpi_train.interop.torch_save import Call, Name, save
from openpi_train.interop.trained_with import other_settings
from openpi_train.models.diffusion_policy import diffusion_policy_checkpoint
from openpi_train.models.diffusion_policy.denoisers import UnetSizes
from openpi_train.runtime.exits import CheckpointError, UsageError

RECORDED = Recorded("diffusion_policy")
SIZES, IO = RECORDED.facts["sizes"], RECORDED.arrays
CONFIG = config_of(
    SIZES,
    cameras=("head_camera",),
    image_height=SIZES["image"][0],
    image_width=SIZES["image"][1],
    image_mean=(0.7425, 0.728, 0.703),
    image_std=(0.1145, 0.112, 0.1125),
)
OBJECTIVE = objective_of(SIZES)


@pytest.fixture(scope="module")
def stored() -> Stored:
    return open_checkpoint(RECORDED.folder, CONFIG)


@pytest.fixture
def narrow(monkeypatch):
    """torchvision's ResNet with the narrow stage that was recorded."""
    monkeypatch.setattr(diffusion_policy_checkpoint, "WIDTHS", CONFIG.encoder_widths)


def test_loss_and_chunk_are_diffusion_policys_from_the_robots_units_on(stored):
    stats = parse_norm_stats(stored.norm_stats["diffusion_policy"], "the file")
    state, actions = (
        normalize(IO[f"in/{name}"], stats[name], CONFIG.rows.normalization).astype(np.float32)
        for name in ("state", "actions")
    )
    batch = batch_of({"head_camera": IO["in/image"]}, state, actions)
    loss, chunk = computed(stored, CONFIG, SIZES, batch, IO)
    found = {"out/loss": loss, "out/chunk": unnormalize(chunk, stats["actions"], CONFIG.rows.normalization)}
    apart = {key: np.abs(value - IO[key]).max() / np.abs(IO[key]).max() for key, value in found.items()}
    print({key: f"{value:.1e}" for key, value in apart.items()}, "torch's float32:", RECORDED.facts["float32"])
    # Rounding of float32, of which torch's own has up to 1.7e-6 in chunks.
    assert max(apart.values()) < 1e-5


def _includes(found, wanted) -> None:
    """Whether nested values are all there; the camera has another name."""
    if isinstance(wanted, dict):
        for name, value in wanted.items():
            _includes(found["head_camera" if name == SIZES["camera"] else name], value)
    else:
        assert found == wanted


def test_what_is_written_is_the_same_policy_and_config(stored, narrow, tmp_path):
    named("diffusion_policy").write(tmp_path / "out", stored, CONFIG)
    written, config = open_payload(tmp_path / "out" / "latest.ckpt")
    genuine, told = open_payload(RECORDED.folder / "latest.ckpt")
    assert written.keys() == genuine.keys() == {"model", "ema_model"}
    theirs = {name.replace("head_cam.", "head_camera."): leaf for name, leaf in genuine["ema_model"].items()}
    for state_dict in written.values():
        assert state_dict.keys() == theirs.keys()
        for name, leaf in state_dict.items():
            assert leaf.shape == theirs[name].shape
            # Scales are computed from the norm stats again.
            np.testing.assert_allclose(leaf.whole(), theirs[name].whole(), rtol=2e-6 * ("params_dict" in name))
    # What the recorded config leaves to defaults is written; the number of sampling steps is the evaluation's.
    _includes(config["policy"], told["policy"] | {"num_inference_steps": None})
    assert config["training"] == told["training"]
    again = open_checkpoint(tmp_path / "out", CONFIG)
    assert again.norm_stats == stored.norm_stats
    assert again.trained_with == stored.trained_with
    for name, leaf in stored.params.items():
        np.testing.assert_array_equal(again.params[name].whole(), leaf.whole(), err_msg=name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"action_horizon": 16}, "horizon is 8: give --model.action-horizon 8"),
        ({"unet": UnetSizes(widths=(8, 16))}, "down_dims is .8, 8.: give --model.unet.widths 8 8"),
        ({"cameras": ("head_camera", "hand")}, "it has the cameras head_cam: give --model.cameras head_cam"),
        ({"pooling": "spatial_softmax"}, "give --model.pooling average"),
        ({"share_encoder": True}, "share_rgb_model is False: give --model.no-share-encoder"),
        ({"image_std": (0.5, 0.5, 0.5)}, "ImageNet's statistics: give --model.image-std 0.1145 0.112 0.1125"),
        ({"denoiser": "mlp"}, "give --model.denoiser unet"),
    ],
)
def test_another_policy_is_refused_with_the_flag_to_give(changes, message):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(RECORDED.folder / "latest.ckpt", dataclasses.replace(CONFIG, **changes))


def test_what_was_trained_otherwise_is_named_with_the_flag_to_give(stored):
    said = "\n".join(other_settings(stored.trained_with, as_json(robot_dp_14), "min_max"))
    assert "objective.sampler is ddim: give --objective.sampler ddim (here ddpm)" in said
    assert "give an experiment with a RandomCrop of this height (here None)" in said


@pytest.mark.parametrize(
    ("changes", "objective", "message"),
    [
        ({"denoiser": "transformer"}, OBJECTIVE, "its denoiser is transformer"),
        ({"relu_features": True}, OBJECTIVE, "its relu_features is True"),
        ({"cameras": ()}, OBJECTIVE, "it has no cameras"),
        ({"image_mean": (0.4, 0.4, 0.4)}, OBJECTIVE, "it normalises images by mean"),
        ({"encoder_widths": (16, 32)}, OBJECTIVE, "its encoder_widths are .16, 32."),
        ({}, pusht_flow.objective, "it does not sample by diffusion"),
    ],
)
def test_what_diffusion_policy_has_not_is_not_written(stored, narrow, tmp_path, changes, objective, message):
    said = as_json(dataclasses.replace(robot_dp_14, objective=objective))
    model = dataclasses.replace(CONFIG, **changes)
    with pytest.raises(UsageError, match=message):
        named("diffusion_policy").write(tmp_path / "out", dataclasses.replace(stored, experiment=said), model)
    assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match="has none"):
        named("diffusion_policy").write(tmp_path / "out", dataclasses.replace(stored, norm_stats={}), CONFIG)


def payload(folder, state_dicts, **others):
    """A file of these state dicts, as the trainer would write it."""
    save(folder / "x.ckpt", {"state_dicts": state_dicts, **others})
    return folder / "x.ckpt"


def test_a_policy_with_robomimics_encoder_is_refused_by_name(tmp_path):
    odd = {"obs_encoder.obs_nets.image.nets.0.weight": in_memory(np.zeros(2, np.float32))}
    with pytest.raises(CheckpointError, match="its image encoder is robomimic's"):
        open_checkpoint(payload(tmp_path, {"model": odd}), CONFIG)
    with pytest.raises(CheckpointError, match="holds no state dict of ema_model or model, but optimizer"):
        open_checkpoint(payload(tmp_path, {"optimizer": odd}), CONFIG)


def test_code_in_a_file_is_not_run_and_a_damaged_one_is_named(tmp_path):
    touched = Call(Name("pathlib", "Path.touch"), (Call(Name("pathlib", "Path"), (str(tmp_path / "touched"),)),))
    path = payload(tmp_path, {"model": {"x": in_memory(np.arange(3.0))}}, cfg=touched)
    models, config = open_payload(path)
    np.testing.assert_array_equal(models["model"]["x"].whole(), np.arange(3.0))
    assert config is None and not (tmp_path / "touched").exists()
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match=r"x\.ckpt "):
        open_payload(path)


def test_norm_stats_of_a_gaussian_normaliser_are_those_of_its_scale_and_offset():
    scale, offset = np.array([2.0, 0.5]), np.array([1.0, -3.0])
    stats = {"min": np.array([-4.0, 4.0]), "max": np.array([3.0, 4.0]), "mean": np.zeros(2), "std": np.ones(2)}
    found = {"scale": scale, "offset": offset, **{f"input_stats.{key}": value for key, value in stats.items()}}
    leaves = {f"normalizer.params_dict.action.{key}": in_memory(value) for key, value in found.items()}
    entry = diffusion_policy_checkpoint._of_normalizer(leaves, "action")
    read = parse_norm_stats({"norm_stats": {"actions": entry}}, "here")["actions"]
    values = np.array([[0.3, -7.0], [5.0, 1.0]])
    np.testing.assert_allclose(normalize(values, read, "min_max"), values * scale + offset, atol=1e-12)
