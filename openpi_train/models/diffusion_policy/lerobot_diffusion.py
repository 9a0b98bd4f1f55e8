"""LeRobot's diffusion policy: the names and layouts of its tensors, its config, and how it was trained.

As `lerobot` 0.6.1 has it (`policies/diffusion`): a UNet, and ResNet-18s with keypoints. What its config says beside the
model's sizes are fields of the experiment (`trained_with`). Read next: `lerobot_policy.py`, which reads and writes its
folders, and `denoiser_tensors.py` for the UNet.
"""

import logging
import operator
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.data.robot.normalize import CONSTANT_RANGE
from openpi_train.interop import safetensors_file
from openpi_train.interop.lerobot_folder import (
    CAMERA,
    FEATURES,
    FORMS,
    differences,
    feature,
    flag_of,
    image_problems,
    image_stats,
    old_stats,
    ranges_there,
    read_stats,
)
from openpi_train.interop.lerobot_form import LeRobotForm, PolicyParts, ReadPolicy
from openpi_train.interop.openpi_torch import OLD_STATS, joined_params, layouts_of
from openpi_train.interop.place import Place
from openpi_train.interop.stored_leaves import Leaves, Stored, in_memory
from openpi_train.interop.torch_names import Layout, TensorLayout, lay_out_tensors, tensors_of
from openpi_train.interop.trained_with import (
    CROP,
    NORMALIZATION,
    NUM_STEPS,
    SAMPLER,
    SCHEDULE,
    SCHEDULE_FIELDS,
    Settings,
    schedule_of,
)
from openpi_train.json_object import JsonObject
from openpi_train.models.act.lerobot_act import STEPS, backbone_layout
from openpi_train.models.diffusion_policy.denoiser_tensors import (
    DENOISER,
    ENCODERS,
    WIDTHS,
    condition_order,
    from_torch,
    renamed,
    to_torch,
    unet_layout,
)
from openpi_train.models.diffusion_policy.diffusion_policy import DiffusionPolicyConfig
from openpi_train.runtime.exits import CheckpointError, UsageError

logger = logging.getLogger(__name__)

TYPE = "diffusion"
# The places of keypoints, a fixed table that LeRobot keeps among the tensors.
_GRID = "pool.pos_grid"
_STATE = "observation.state"
# LeRobot's fields, and ours that must be equal.
_EQUAL = {name: name for name in ("n_obs_steps", "n_action_steps", "diffusion_step_embed_dim")}
_EQUAL |= {"horizon": "action_horizon", "kernel_size": "unet.kernel_size", "n_groups": "unet.num_groups"}
_EQUAL |= {"down_dims": "unet.widths", "spatial_softmax_num_keypoints": "num_keypoints"}
# Fixed here: another value computes something else.
_FIXED = {"vision_backbone": "resnet18", "use_group_norm": True, "use_film_scale_modulation": True}
# What the model must be, for a policy of LeRobot's.
_MODEL = {"denoiser": "unet", "pooling": "spatial_softmax", "relu_features": True}
_SEPARATE = "use_separate_rgb_encoder_per_camera"
_HEAD = {"maps/kernel": ("pool.nets.weight", "i o -> o i () ()"), "maps/bias": ("pool.nets.bias", "o -> o")}
_HEAD |= {"outputs/kernel": ("out.weight", "i o -> o i"), "outputs/bias": ("out.bias", "o -> o")}


def _layout(cameras: Sequence[str]) -> Layout:
    """The layouts of a policy's parameters, whose cameras LeRobot has in this order."""

    def layout(name: str, shape: tuple[int, ...]) -> TensorLayout:
        if name.startswith(DENOISER):
            found = unet_layout(name.removeprefix(DENOISER), shape)
            found = renamed(found, "", r"blocks\.([01])\.block", lambda one: f"conv{int(one[1]) + 1}.block")
            return renamed(found, "diffusion.unet.", r"\.2\.conv\.", ".2.")
        slot, _, rest = name.removeprefix(ENCODERS).partition("/")
        prefix = "diffusion.rgb_encoder." + ("" if slot == "shared" else f"{cameras.index(slot)}.")
        if rest.startswith("head/"):
            tensor, dims = _HEAD[rest.removeprefix("head/")]
            return lay_out_tensors(f"{prefix}{tensor}", dims, shape)
        return renamed(backbone_layout(rest, shape), f"{prefix}backbone.", r"^[a-z]+\d", _in_sequence)

    return layout


def _in_sequence(found: re.Match[str]) -> str:
    """The number of a part of torchvision's ResNet in LeRobot's sequence of them: conv1, bn1, ReLU, pooling, stages."""
    part = found[0]
    return {"conv1": "0", "bn1": "1"}.get(part) or str(int(part.removeprefix("layer")) + 3)


def read(folder: Place, config: JsonObject, model: DiffusionPolicyConfig) -> ReadPolicy:
    """The parameters and norm stats of a policy's folder, and how it was trained.

    Raises CheckpointError if the policy does not fit the model, or a tensor is missing, unknown, or of another shape.
    """
    found = safetensors_file.open_model(folder)
    stats = dict(old_stats(found, config) or read_stats(folder))
    cameras = _check(config, model, stats, str(folder))
    tensors = {name: leaf for name, leaf in found.items() if not name.endswith(_GRID)}
    tensors = {name: leaf for name, leaf in tensors.items() if not name.startswith(OLD_STATS)}
    params = joined_params(folder, tensors, layouts_of(model, _layout(cameras)), model)
    trained_with = _trained_with(config)
    if (steps := config.get("num_inference_steps")) is not None:
        logger.info("%s samples in %d steps: --eval.num-sample-steps %d does the same", folder, steps, steps)
    params = from_torch(params, condition_order(model, cameras, state_first=True))
    stats = _with_ranges(stats, trained_with[NORMALIZATION])
    return ReadPolicy(params=params, stats=stats, trained_with=trained_with)


def _check(config: JsonObject, model: DiffusionPolicyConfig, stats: Leaves, where: str) -> list[str]:
    """The model's cameras in the policy's order. Raises CheckpointError with all that is not as in the model."""
    problems = differences(config, model, _FIXED, _EQUAL, "a diffusion policy")
    problems += [
        f"LeRobot's have it otherwise: give {flag_of(f'model.{one[0]}', one[1])}"
        for one in _MODEL.items()
        if _differs(model, one)
    ]
    if config.get(_SEPARATE, True) is model.share_encoder and model.cameras:
        problems.append(
            f"{_SEPARATE} is {model.share_encoder}: give {flag_of('model.share_encoder', not model.share_encoder)}"
        )
    if model.instructions:
        problems.append("it reads no instruction: leave --model.instructions out")
    inputs = config["input_features"]
    visual = {name: entry["shape"] for name, entry in inputs.items() if entry["type"] == "VISUAL"}
    names = [name.removeprefix(CAMERA) for name in visual]
    cameras = list(model.cameras) if len(names) == len(model.cameras) == 1 else names
    if sorted(cameras) != sorted(model.cameras):
        problems.append(
            f"it has the cameras {', '.join(names)}: give --model.cameras {' '.join(names)}, or name them in its "
            f"config.json as here ({', '.join(model.cameras)})"
        )
    if others := [name for name in inputs if name != _STATE and name not in visual]:
        problems.append(f"it reads {', '.join(others)} beside images and state: diffusion policies here do not")
    forms = config.get("normalization_mapping", {})
    if forms.get("STATE") != forms.get("ACTION") or forms.get("STATE") not in FORMS.values():
        problems.append(f"it normalises by {forms}: here states and actions alike, by {' or '.join(FORMS.values())}")
    problems += _check_images(model, forms.get("VISUAL"), visual, stats)
    if problems:
        raise CheckpointError("\n".join([f"{where} does not fit the model:", *(f"  {text}" for text in problems)]))
    seen = [tuple(config.get("resize_shape") or shape[1:]) for shape in visual.values()]
    if odd := sorted({size for size in seen if size != (model.image_height, model.image_width)}):
        own = (model.image_height, model.image_width)
        logger.warning("%s sees images of %s (rows, columns), the model of %s: others than it knows", where, odd, own)
    return cameras


def _differs(model: DiffusionPolicyConfig, wanted: tuple[str, object]) -> bool:
    """Whether the model has another value of a field; those of encoders do not count without cameras."""
    field, value = wanted
    return getattr(model, field) != value and (field == "denoiser" or bool(model.cameras))


def _check_images(model: DiffusionPolicyConfig, form: object, visual: JsonObject, stats: Leaves) -> list[str]:
    """Why images are normalised in another way than the model's."""
    if not visual:
        return []
    if form not in ("MEAN_STD", "IDENTITY"):
        return [f"it normalises images by {form}: here by mean and deviation (MEAN_STD)"]
    if form == "IDENTITY" or not all(f"{name}.mean" in stats for name in visual):
        plain = {"mean": np.zeros(3), "std": np.ones(3)}
        stats = {f"{name}.{key}": in_memory(values) for name in visual for key, values in plain.items()}
    return image_problems(model, stats)


def _trained_with(config: JsonObject) -> dict[str, Any]:
    """The fields of an experiment that the policy's config says, by dotted name."""
    crop = config.get("crop_shape") or (None, None)
    schedule = {f"{SCHEDULE}.{field}": config[field] for field in SCHEDULE_FIELDS if field in config}
    form = config["normalization_mapping"]["ACTION"]
    return {
        **schedule,
        SAMPLER: config.get("noise_scheduler_type", "DDPM").lower(),
        **dict(zip(CROP, crop, strict=True)),
        NORMALIZATION: next(name for name, theirs in FORMS.items() if theirs == form),
    }


def _with_ranges(stats: Leaves, form: str) -> Leaves:
    """The statistics under which dims that never move are normalised as LeRobot does it: to -1, where here it is 0."""
    if form != "min_max":
        return stats
    changed = dict(stats)
    for name in FEATURES.values():
        if f"{name}.min" not in stats:
            continue
        low, high = (stats[f"{name}.{key}"].whole().astype(np.float64) for key in ("min", "max"))
        if (still := high - low < CONSTANT_RANGE).any():
            dims = ", ".join(map(str, np.flatnonzero(still)))
            logger.warning("dims %s of %s never move: such values are -1 for the model, as in LeRobot", dims, name)
            changed[f"{name}.max"] = in_memory(np.where(still, low + 2, high))
    return changed


def parts(
    stored: Stored, model: DiffusionPolicyConfig, stats: Mapping[str, np.ndarray], settings: Settings
) -> PolicyParts:
    """What a policy's folder holds. Raises UsageError if LeRobot has no such policy."""
    config = config_of(model, settings)
    stats = ranges_there(stats, FORMS[settings[NORMALIZATION]])
    return PolicyParts(
        config=config,
        stats={**stats, **image_stats(model)},
        steps=STEPS,
        write_tensors=lambda directory: write_params(directory, stored.params, model, config),
    )


def write_params(directory: Path, params: Leaves, model: DiffusionPolicyConfig, config: JsonObject) -> None:
    """Write `model.safetensors` for strict loading by LeRobot, given the policy's `config`."""
    cameras = sorted(model.cameras)
    ours = to_torch(params, condition_order(model, cameras, state_first=True))
    with tensors_of(ours, directory, _layout(cameras)) as tensors:
        grid = _keypoint_grid(config["crop_shape"] or (model.image_height, model.image_width), len(WIDTHS))
        for name in [name for name in tensors if name.endswith("pool.nets.weight")]:
            tensors[name.replace("pool.nets.weight", _GRID)] = in_memory(grid)
        safetensors_file.write_file(
            directory / safetensors_file.FILE,
            dict(sorted(tensors.items())),
            metadata={"format": "pt"},
        )


def _keypoint_grid(size: Sequence[int], num_stages: int) -> np.ndarray:
    """The place (x, y) of each cell of the last feature map of images of this size (rows, columns), float32."""
    for _ in range(num_stages + 1):
        size = [(length + 1) // 2 for length in size]  # the stem, the pooling, and every stage but the first
    rows, columns = (np.linspace(-1, 1, length) for length in size)
    return np.stack(np.meshgrid(columns, rows), axis=-1).reshape(-1, 2).astype(np.float32)


def config_of(model: DiffusionPolicyConfig, settings: Settings) -> dict[str, Any]:
    """The `config.json` of a model that was trained with these settings, without what is left to LeRobot's defaults.

    Raises UsageError if LeRobot has no such policy.
    """
    problems = [
        f"its {field} is {getattr(model, field)}" for field, one in _MODEL.items() if _differs(model, (field, one))
    ]
    if not model.cameras:
        problems.append("it has no cameras")
    if model.instructions:
        problems.append("it reads instructions")
    if tuple(model.encoder_widths) != WIDTHS:
        problems.append(f"its encoder_widths are {model.encoder_widths}")
    if model.action_horizon % (unit := 2 ** len(model.unet.widths)):
        problems.append(f"its action_horizon {model.action_horizon} is not a multiple of {unit}")
    if settings.get(SAMPLER) is None:
        problems.append("it does not sample by diffusion")
    if settings.get(f"{SCHEDULE}.prediction_type") == "v_prediction":
        problems.append("it predicts velocities (prediction_type v_prediction)")
    if problems:
        raise UsageError(
            f"this model is not one of LeRobot's diffusion policies: {'; '.join(problems)}. One that can be written is "
            "trained by diffusion with --model.denoiser unet, --model.pooling spatial_softmax and "
            f"--model.relu-features, encoder_widths {WIDTHS}, a camera at least and no instructions"
        )
    image = feature("VISUAL", 3, model.image_height, model.image_width)
    form = FORMS[settings[NORMALIZATION]]
    crop = [settings.get(side) for side in CROP]
    return {
        "type": TYPE,
        "input_features": {
            **{f"{CAMERA}{slot}": image for slot in sorted(model.cameras)},
            _STATE: feature("STATE", model.used_state_dim),
        },
        "output_features": {"action": feature("ACTION", model.action_dim)},
        "normalization_mapping": {"VISUAL": "MEAN_STD", "STATE": form, "ACTION": form},
        **_FIXED,
        **{field: operator.attrgetter(ours)(model) for field, ours in _EQUAL.items()},
        "drop_n_last_frames": model.action_horizon - model.n_action_steps - model.n_obs_steps + 1,
        "pretrained_backbone_weights": None,
        "resize_shape": None,
        "crop_shape": crop if crop[0] is not None else None,
        _SEPARATE: not model.share_encoder,
        "noise_scheduler_type": str(settings[SAMPLER]).upper(),
        **schedule_of(settings),
        "num_inference_steps": settings.get(NUM_STEPS),
    }


LEROBOT = LeRobotForm(types=(TYPE,), type_of=lambda _: TYPE, read=read, parts=parts)
