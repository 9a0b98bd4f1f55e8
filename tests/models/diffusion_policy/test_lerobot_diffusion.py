"""Diffusion policies against what LeRobot computed and wrote: loss, chunks, rows; its folder, read and written."""

import dataclasses
import json
import re

import numpy as np
import pytest
from lerobot_recorded import Recorded
from openpi_train_configs.robot_dp import pusht_dp, pusht_flow
from recorded_diffusion import batch_of, computed, config_of, objective_of

from openpi_train.checkpoints.checkpoint_formats import named, open_checkpoint
from openpi_train.data.robot.normalize import normalize, parse_norm_stats, unnormalize
from openpi_train.experiment import Experiment
from openpi_train.fields import as_json
from openpi_train.interop import lerobot_folder
from openpi_train.interop.place import Place
from openpi_train.interop.safetensors_file import open_file, open_model
from openpi_train.interop.stored_leaves import Stored
from openpi_train.interop.trained_with import other_settings
from openpi_train.models.diffusion_policy import lerobot_diffusion
from openpi_train.models.diffusion_policy.denoisers import UnetSizes
from openpi_train.nn.augment import RandomCrop
from openpi_train.runtime.exits import CheckpointError, UsageError

RECORDED = Recorded("lerobot_diffusion")
SIZES, IO = RECORDED.facts["sizes"], RECORDED.arrays
CONFIG = config_of(
    SIZES,
    cameras=("head", "wrist"),
    image_height=SIZES["height"],
    image_width=SIZES["width"],
    image_mean=tuple(SIZES["mean"]),
    image_std=tuple(SIZES["std"]),
    pooling="spatial_softmax",
    num_keypoints=SIZES["spatial_softmax_num_keypoints"],
    relu_features=True,
)
OBJECTIVE = objective_of(SIZES)


@pytest.fixture(scope="module")
def stored() -> Stored:
    return open_checkpoint(RECORDED.folder, CONFIG)


@pytest.fixture
def narrow(monkeypatch):
    """LeRobot's ResNet with the narrow stages that were recorded."""
    monkeypatch.setattr(lerobot_diffusion, "WIDTHS", CONFIG.encoder_widths)


def test_loss_and_chunk_are_lerobots(stored):
    images = {slot: IO[f"in/image/{slot}"] for slot in CONFIG.cameras}
    loss, chunk = computed(stored, CONFIG, SIZES, batch_of(images, IO["in/state"], IO["in/actions"]), IO)
    # LeRobot's chunk begins with the current step, the last of the observed ones.
    found = {"out/loss": loss, "out/chunk": chunk[:, CONFIG.n_obs_steps - 1 :]}
    apart = {key: np.abs(value - IO[key]).max() / np.abs(IO[key]).max() for key, value in found.items()}
    print({key: f"{value:.1e}" for key, value in apart.items()}, "LeRobot's float32:", RECORDED.facts["float32"])
    # Rounding of float32, of which LeRobot's own has up to 1.4e-6 in chunks.
    assert max(apart.values()) < 1e-5


def test_rows_are_normalised_as_lerobots_processors_do(stored):
    stats = parse_norm_stats(stored.norm_stats["lerobot"], "the folder")
    for name in ("state", "actions"):
        normal = normalize(IO[f"in/{name}"], stats[name], CONFIG.rows.normalization)
        np.testing.assert_allclose(normal, IO[f"norm/{name}"], rtol=1e-6, atol=1e-6)
    back = unnormalize(IO["norm/actions"][:, 0], stats["actions"], CONFIG.rows.normalization)
    np.testing.assert_allclose(back, IO["norm/back"], rtol=1e-6, atol=1e-6)


def test_what_is_written_is_lerobots_folder_again(stored, narrow, tmp_path):
    named("lerobot").write(tmp_path / "out", stored, CONFIG)
    names = {path.name for path in RECORDED.folder.iterdir()} - {"io.npz", "recorded.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    config, genuine = (
        json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "out", RECORDED.folder)
    )
    # Cameras in the order of their names: a folder of LeRobot's has its own order, and the encoders in that.
    assert list(config["input_features"]) == [f"observation.images.{slot}" for slot in ("head", "wrist")] + [
        "observation.state"
    ]
    # Of the evaluation, which nothing recorded, and a default there.
    del config["num_inference_steps"], config["drop_n_last_frames"]
    assert {**genuine, **config} == genuine
    written, theirs = (open_model(Place.of(folder)) for folder in (tmp_path / "out", RECORDED.folder))
    assert set(written) == set(theirs)
    swapped = {"rgb_encoder.0.": "rgb_encoder.1.", "rgb_encoder.1.": "rgb_encoder.0."}
    for tensor, leaf in written.items():
        there = next((tensor.replace(*pair) for pair in swapped.items() if pair[0] in tensor), tensor)
        if tensor.endswith("pos_grid"):  # the recorded one is in bfloat16
            np.testing.assert_allclose(leaf.whole(), theirs[there].whole(), rtol=4e-3)
        elif "cond_encoder" not in tensor or tensor.endswith("bias"):
            np.testing.assert_array_equal(leaf.whole(), theirs[there].whole(), err_msg=tensor)
    again = open_checkpoint(tmp_path / "out", CONFIG)
    assert again.trained_with == stored.trained_with and again.norm_stats == stored.norm_stats
    for name, leaf in stored.params.items():
        np.testing.assert_array_equal(again.params[name].whole(), leaf.whole(), err_msg=name)
    file = next(name for name in names if name.startswith("policy_preprocessor_step"))
    ours, theirs = (open_file(Place.of(folder), file) for folder in (tmp_path / "out", RECORDED.folder))
    for key, leaf in ours.items():
        added = 1e-6 * ("images" in key and key.endswith("std"))  # by our processors, to every divisor
        np.testing.assert_allclose(leaf.whole() + added, theirs[key].whole(), rtol=1e-6)


def test_dims_that_never_move_are_normalised_as_before_in_both_directions():
    """LeRobot maps the only value of such a dim to -1, ours to 0."""
    low, high = np.array([-1.0, 2.0]), np.array([3.0, 2.0])
    plain = np.zeros(2)
    stats = {f"action.{key}": value for key, value in (("mean", plain), ("std", plain), ("min", low), ("max", high))}
    found = lerobot_folder.ranges_there(stats, "MIN_MAX")
    values = np.array([[0.0, 2.0], [3.0, 2.5]])
    theirs = 2 * (values - found["action.min"]) / (found["action.max"] - found["action.min"]) - 1
    content = {"mean": plain, "std": plain, "min": low, "max": high}
    own = parse_norm_stats({"norm_stats": {"actions": content}}, "here")["actions"]
    np.testing.assert_allclose(theirs, normalize(values, own, "min_max"), atol=1e-12)
    with pytest.raises(UsageError, match="have no min and max"):
        lerobot_folder.ranges_there({"action.mean": plain}, "MIN_MAX")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"action_horizon": 16}, "horizon is 8: give --model.action-horizon 8"),
        ({"unet": UnetSizes(widths=(8, 24))}, "down_dims is .8, 16.: give --model.unet.widths 8 16"),
        ({"cameras": ("head", "hand")}, "it has the cameras wrist, head: give --model.cameras wrist head"),
        ({"relu_features": False}, "give --model.relu-features"),
        ({"pooling": "average"}, "give --model.pooling spatial_softmax"),
        ({"share_encoder": True}, "per_camera is True: give --model.no-share-encoder"),
        ({"image_std": (0.5, 0.5, 0.5)}, "the std 0.229 0.224 0.225: give --model.image-std 0.229 0.224 0.225"),
        ({"denoiser": "mlp"}, "give --model.denoiser unet"),
    ],
)
def test_another_policy_is_refused_with_the_flag_to_give(changes, message):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(RECORDED.folder, dataclasses.replace(CONFIG, **changes))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("use_group_norm", False, "use_group_norm is False: a diffusion policy here has True"),
        ("use_film_scale_modulation", False, "use_film_scale_modulation is False"),
        ("vision_backbone", "resnet34", "vision_backbone is 'resnet34'"),
        ("type", "act", "holds a policy of type 'act' and the model is 'diffusion': give an experiment of act"),
        ("normalization_mapping", {"ACTION": "MIN_MAX", "STATE": "MEAN_STD"}, "states and actions alike"),
    ],
)
def test_what_is_not_implemented_is_refused(field, value, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(RECORDED.with_field(field, value, tmp_path), CONFIG)


def experiment(objective) -> Experiment:
    return dataclasses.replace(pusht_dp, model=CONFIG, objective=objective)


def test_what_was_trained_otherwise_is_named_with_the_flag_to_give(stored):
    assert not other_settings(stored.trained_with, as_json(experiment(OBJECTIVE)), "min_max")
    noisy = dataclasses.replace(OBJECTIVE.noise_schedule, clip_sample=False, num_train_timesteps=50)
    other = dataclasses.replace(
        OBJECTIVE, sampler="ddpm", noise_schedule=noisy, augmentation=RandomCrop(height=18, width=20)
    )
    said = "\n".join(other_settings(stored.trained_with, as_json(experiment(other)), "z_score"))
    for flag in (
        "--objective.noise-schedule.num-train-timesteps 100",
        "--objective.noise-schedule.clip-sample",
        "--objective.sampler ddim",
        "--objective.augmentation.width 25",
        "--data.normalization min_max",
    ):
        assert f"give {flag} (here" in said
    flow = "\n".join(other_settings(stored.trained_with, as_json(pusht_flow), "min_max"))
    assert re.search(r"--objective\.sampler ddim \(here None", flow)


@pytest.mark.parametrize(
    ("changes", "objective", "message"),
    [
        ({"denoiser": "mlp"}, OBJECTIVE, "its denoiser is mlp"),
        ({"pooling": "average"}, OBJECTIVE, "its pooling is average"),
        ({"relu_features": False}, OBJECTIVE, "its relu_features is False"),
        ({"cameras": ()}, OBJECTIVE, "it has no cameras"),
        ({"instructions": ("go",)}, OBJECTIVE, "it reads instructions"),
        ({"encoder_widths": (16, 32)}, OBJECTIVE, "its encoder_widths are .16, 32."),
        ({"action_horizon": 10}, OBJECTIVE, "action_horizon 10 is not a multiple of 4"),
        ({}, pusht_flow.objective, "it does not sample by diffusion"),
    ],
)
def test_what_lerobot_has_not_is_not_written(stored, narrow, tmp_path, changes, objective, message):
    said = as_json(experiment(objective))
    model = dataclasses.replace(CONFIG, **changes)
    with pytest.raises(UsageError, match=message):
        named("lerobot").write(tmp_path / "out", dataclasses.replace(stored, experiment=said), model)
    assert not (tmp_path / "out").exists()
