"""Checkpoints of diffusion_policy's trainers, and of RoboTwin's `policy/DP`: a file by torch.save (`latest.ckpt`).

It holds the config, the weights and their average as state dicts, and the norm stats among them, as scale and offset.
Of its policies it is `DiffusionUnetImagePolicy` with a `MultiImageObsEncoder` (real-stanford/diffusion_policy at
5ba07ac). The average is read if there is one, as the trainer's own evaluation does. Read next: `torch_file.py`,
`torch_save.py`, `denoiser_tensors.py`.
"""

import logging
import operator
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.data.robot.normalize import CONSTANT_RANGE, Form, normalize, parse_norm_stats
from openpi_train.interop.lerobot_folder import differences, flag_of
from openpi_train.interop.openpi_torch import joined_params, layouts_of, needed
from openpi_train.interop.place import Place
from openpi_train.interop.robot_actions import ActionDims, stored_action_dims
from openpi_train.interop.stored_leaves import Leaves, Stored, StoredLeaf, Writer, in_memory
from openpi_train.interop.torch_file import open_payload
from openpi_train.interop.torch_names import Layout, TensorLayout, tensors_of
from openpi_train.interop.torch_save import Call, Name, save
from openpi_train.interop.trained_with import (
    CROP,
    NORMALIZATION,
    NUM_STEPS,
    SAMPLER,
    SCHEDULE,
    SCHEDULE_FIELDS,
    schedule_of,
    settings_of,
)
from openpi_train.json_object import JsonObject
from openpi_train.models.act.act import IMAGENET_MEAN, IMAGENET_STD
from openpi_train.models.act.lerobot_act import backbone_layout
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
from openpi_train.models.diffusion_policy.diffusion_policy_network import UNIT_RANGE
from openpi_train.models.model_config import ModelConfig
from openpi_train.runtime.exits import CheckpointError, UsageError

logger = logging.getLogger(__name__)

FILE, ASSET_ID, _SUFFIX = "latest.ckpt", "diffusion_policy", ".ckpt"
_MODELS = ("ema_model", "model")
_ENCODER, _SHARED, _NORMALIZER = "obs_encoder.key_model_map.", "rgb", "normalizer.params_dict."
# Empty parameters by which its modules know their device.
_DUMMY = re.compile(r"(.*\.)?_dummy_variable")
_DUMMIES = ("_dummy_variable", "obs_encoder._dummy_variable", "mask_generator._dummy_variable")
_STATE, _STATS = "agent_pos", ("min", "max", "mean", "std")
# diffusion_policy's fields of a policy and ours that must be equal, and those that are fixed here.
_EQUAL = {name: name for name in ("n_obs_steps", "n_action_steps", "diffusion_step_embed_dim")}
_EQUAL |= {"horizon": "action_horizon", "kernel_size": "unet.kernel_size", "n_groups": "unet.num_groups"}
_EQUAL |= {"down_dims": "unet.widths"}
_FIXED = {"cond_predict_scale": True, "obs_as_global_cond": True}
_ENCODER_EQUAL, _ENCODER_FIXED = {"share_rgb_model": "share_encoder"}, {"use_group_norm": True, "resize_shape": None}
# What the model must be, for a policy of diffusion_policy's.
_MODEL = {"denoiser": "unet", "pooling": "average", "relu_features": False}
# ImageNet's statistics of pixels in [0, 1], which it applies to images that are scaled to [-1, 1] already.
_TWICE = (
    tuple(round((1 + mean) / 2, 6) for mean in IMAGENET_MEAN),
    tuple(round(std / 2, 6) for std in IMAGENET_STD),
)
_PLAIN = (UNIT_RANGE, UNIT_RANGE)
_SCHEDULERS = {"ddpm": "scheduling_ddpm.DDPMScheduler", "ddim": "scheduling_ddim.DDIMScheduler"}


def recognises(place: Place) -> bool:
    """Whether it is a file of this ending on a disk, or the folder of one: a run of the trainer, or what is written."""
    return _file(place) is not None


def _file(place: Place) -> Path | None:
    if place.local is None:
        return None
    found = (place.local, place.local / FILE, place.local / "checkpoints" / FILE)
    return next((path for path in found if path.suffix == _SUFFIX and path.is_file()), None)


def open_checkpoint(place: Place, model: ModelConfig | None = None) -> Stored:
    """Open the parameters by published name, and the norm stats. Raises CheckpointError if they do not fit."""
    path, model = _file(place), needed(model, place)
    assert path is not None, "`recognises` has looked for it"
    models, config = open_payload(path)
    which = next((name for name in _MODELS if name in models), None)
    if which is None:
        raise CheckpointError(f"{path} holds no state dict of {' or '.join(_MODELS)}, but {', '.join(models)}")
    if not isinstance(model, DiffusionPolicyConfig):
        raise CheckpointError(f"{path} is of diffusion_policy, and the model is {type(model).__name__}: see `list`")
    logger.info("%s: the weights are those of %s", path, which)
    found = {name: leaf for name, leaf in models[which].items() if not _DUMMY.fullmatch(name)}
    if robomimic := next((name for name in found if name.startswith("obs_encoder.obs_nets.")), None):
        raise CheckpointError(
            f"{path}: its image encoder is robomimic's ({robomimic}), which is not read; a policy with "
            "diffusion_policy's own MultiImageObsEncoder is"
        )
    policy = config.get("policy") if isinstance(config, Mapping) else None
    if odd := _relative_poses(config):
        raise CheckpointError(
            f"{path} has poses of other frames, {odd}: here they are as recorded, choose another policy"
        )
    cameras, states = _inputs(found, policy)
    _check(policy, model, cameras, str(path))
    tensors = {name: leaf for name, leaf in found.items() if not name.startswith(_NORMALIZER)}
    params = joined_params(place, tensors, layouts_of(model, _layout(model, cameras)), model)
    return Stored(
        where=str(place),
        format="diffusion_policy",
        params=from_torch(params, _same_order(model)),
        norm_stats=_norm_stats(found, states),
        trained_with=_trained_with(policy) if policy else {},
        action_dims=ActionDims.absolute(model.action_dim),
    )


def _relative_poses(config: object) -> dict[str, str]:
    """What UMI's copy of the trainer says of poses (`task.pose_repr`) that are not absolute."""
    task = config.get("task") if isinstance(config, Mapping) else None
    said = task.get("pose_repr") if isinstance(task, Mapping) else None
    return {name: str(value) for name, value in said.items() if value != "abs"} if isinstance(said, Mapping) else {}


def _inputs(found: Leaves, policy: JsonObject | None) -> tuple[list[str], list[str]]:
    """The names of its cameras and of its states, each in the order in which the policy joins them."""
    if policy and isinstance(policy.get("shape_meta"), Mapping):
        kinds = {name: entry.get("type", "low_dim") for name, entry in policy["shape_meta"]["obs"].items()}
    else:
        cameras = {name.removeprefix(_ENCODER).split(".")[0] for name in found if name.startswith(_ENCODER)}
        named = {name.removeprefix(_NORMALIZER).split(".")[0] for name in found if name.startswith(_NORMALIZER)}
        kinds = {name: "rgb" if name in cameras else "low_dim" for name in (named | cameras) - {"action", _SHARED}}
    cameras = sorted(str(name) for name, kind in kinds.items() if kind == "rgb")
    return cameras, sorted(str(name) for name, kind in kinds.items() if kind == "low_dim")


def _check(policy: JsonObject | None, model: DiffusionPolicyConfig, cameras: Sequence[str], where: str) -> None:
    """Raise CheckpointError with all that the policy's config has otherwise than the model."""
    problems = [
        f"diffusion_policy's have it otherwise: give {flag_of(f'model.{field}', value)}"
        for field, value in _MODEL.items()
        if getattr(model, field) != value
    ]
    if model.instructions:
        problems.append("it reads no instruction: leave --model.instructions out")
    if cameras != sorted(model.cameras) and not len(cameras) == len(model.cameras) == 1:
        problems.append(f"it has the cameras {', '.join(cameras)}: give --model.cameras {' '.join(cameras)}")
    if policy is None:
        logger.warning("%s has no config: whether it computes as the model is known by its tensors only", where)
    else:
        encoder = policy.get("obs_encoder") or {}
        problems += differences(policy, model, _FIXED, _EQUAL, "a diffusion policy")
        problems += differences(encoder, model, _ENCODER_FIXED, _ENCODER_EQUAL, "an image encoder")
        wanted = _TWICE if encoder.get("imagenet_norm") else _PLAIN
        given = (model.image_mean, model.image_std)
        for name, value, own in zip(("image_mean", "image_std"), wanted, given, strict=True):
            if cameras and not np.allclose(value, own, rtol=1e-5):
                what = "normalises images by ImageNet's statistics" if wanted is _TWICE else "sees images in [-1, 1]"
                problems.append(f"it {what}: give {flag_of(f'model.{name}', value)}")
    if problems:
        raise CheckpointError("\n".join([f"{where} does not fit the model:", *(f"  {text}" for text in problems)]))


def _trained_with(policy: JsonObject) -> dict[str, Any]:
    """The fields of an experiment that the policy's config says, by dotted name."""
    scheduler, encoder = policy.get("noise_scheduler") or {}, policy.get("obs_encoder") or {}
    # Without random_crop its encoder cuts nothing, by a mistake in its code.
    crop = encoder.get("crop_shape") if encoder.get("random_crop", True) else None
    found = {f"{SCHEDULE}.{field}": scheduler[field] for field in SCHEDULE_FIELDS if field in scheduler}
    found |= dict(zip(CROP, crop or (None, None), strict=True))
    found[SAMPLER] = "ddim" if "DDIM" in str(scheduler.get("_target_")) else "ddpm"
    # As such they are read, whatever they were fitted to.
    return {**found, NORMALIZATION: "min_max"}


def _norm_stats(found: Leaves, states: Sequence[str]) -> dict[str, Any]:
    """The norm stats under which min-max normalisation is the policy's, as in openpi's `norm_stats.json`."""
    stats = {}
    for name, keys in (("state", states), ("actions", ("action",))):
        parts = [_of_normalizer(found, key) for key in keys]
        if not parts or any(part is None for part in parts):
            return {}
        stats[name] = {key: np.concatenate([part[key] for part in parts if part]).tolist() for key in _STATS}
    return {ASSET_ID: {"norm_stats": stats}}


def _of_normalizer(found: Leaves, key: str) -> dict[str, np.ndarray] | None:
    """The statistics of one input; `min` and `max` are where its scale and offset give -1 and 1."""
    prefix = f"{_NORMALIZER}{key}."
    if f"{prefix}scale" not in found:
        return None
    scale, offset = (found[prefix + name].whole().astype(np.float64).reshape(-1) for name in ("scale", "offset"))
    given = {name: found[f"{prefix}input_stats.{name}"].whole().astype(np.float64).reshape(-1) for name in _STATS}
    low, high = given["min"], given["max"]
    still = high - low < CONSTANT_RANGE
    # What scale and offset make of the extremes, and what they should if they were fitted to them (mode "limits").
    ends = np.stack([low, np.where(still, low + 1, high)]) * scale + offset
    fitted = np.abs(ends - np.where(still, [[0], [1]], [[-1], [1]])) < _ROUNDING
    return given if fitted.all() else {**given, "min": (-1 - offset) / scale, "max": (1 - offset) / scale}


# Its normaliser of images, from [0, 1] to [-1, 1] (`get_image_range_normalizer`).
_PIXELS: Mapping[str, Any] = {"scale": 2.0, "offset": -1.0, "input_stats.min": 0.0, "input_stats.max": 1.0}
_PIXELS |= {"input_stats.mean": 0.5, "input_stats.std": np.sqrt(1 / 12)}
# By how much a scale may miss the ends of the range that it was fitted to.
_ROUNDING = 1e-4


def _layout(model: DiffusionPolicyConfig, cameras: Sequence[str]) -> Layout:
    """The layouts of a policy's parameters, whose cameras have these names there, in the order of ours."""
    names = dict(zip(sorted(model.cameras), cameras, strict=True)) if not model.share_encoder else {"shared": _SHARED}

    def layout(name: str, shape: tuple[int, ...]) -> TensorLayout:
        if name.startswith(DENOISER):
            return renamed(unet_layout(name.removeprefix(DENOISER), shape), "model.")
        slot, _, rest = name.removeprefix(ENCODERS).partition("/")
        return renamed(backbone_layout(rest, shape), f"{_ENCODER}{names[slot]}.")

    return layout


def _same_order(model: DiffusionPolicyConfig) -> np.ndarray:
    """The order of a condition that is joined as ours: cameras by name, then the state."""
    return condition_order(model, sorted(model.cameras), state_first=False)


def _listed(value: object) -> Any:
    return list(value) if isinstance(value, tuple) else value


def prepare(stored: Stored, model: ModelConfig | None = None) -> Writer:
    """The writer of `latest.ckpt` into a new directory, for the trainer's `load_payload`.

    Raises UsageError if the trainer has no such policy.
    """
    if not isinstance(model, DiffusionPolicyConfig):
        raise UsageError("diffusion_policy's form is for diffusion policies: give the experiment of one")
    settings = settings_of(stored.experiment) if stored.experiment else stored.trained_with
    config = config_of(model, settings)
    if (actions := stored_action_dims(stored)) is not None and any(actions.relative):
        raise UsageError(
            f"the actions of {stored.where} are {actions.in_words()}, and those of diffusion_policy's are absolute: "
            "train with a robot whose actions are, or convert --to lerobot"
        )
    normalizer = _normalizer(stored, sorted(model.cameras), settings.get(NORMALIZATION) or model.rows.normalization)
    params, layout = to_torch(stored.params, _same_order(model)), _layout(model, sorted(model.cameras))
    create = Call(Name("__builtin__", "getattr"), (Name("omegaconf", "OmegaConf"), "create"))

    def write(directory: Path) -> None:
        directory.mkdir(parents=True)
        with tensors_of(params, directory, layout) as tensors:
            dummies = {name: in_memory(np.zeros(0, np.float32)) for name in _DUMMIES}
            every = {**dummies, **tensors, **normalizer}
            models = dict(zip(_MODELS[::-1], (every, every), strict=True))
            save(directory / FILE, {"cfg": Call(create, (config,)), "state_dicts": models, "pickles": {}})

    return write


def _normalizer(stored: Stored, cameras: Sequence[str], form: Form) -> dict[str, StoredLeaf]:
    """The tensors of the policy's normaliser, which does what the norm stats do in this form, and scales images."""
    if len(stored.norm_stats) != 1:
        raise UsageError(
            f"a policy of diffusion_policy has one set of norm stats, {stored.where} has "
            f"{', '.join(stored.norm_stats) or 'none'}: convert a checkpoint with one of them, or give --norm-stats "
            "and --asset-id"
        )
    stats = parse_norm_stats(next(iter(stored.norm_stats.values())), stored.where)
    tables = dict.fromkeys(cameras, _PIXELS)
    for key, name in ((_STATE, "state"), ("action", "actions")):
        entry = stats[name]
        if entry.low is None or entry.high is None:
            raise UsageError(
                f"the norm stats of {name} have no min and max: give such with --norm-stats and --asset-id"
            )
        zero = normalize(np.zeros(len(entry.mean)), entry, form)
        numbers = {"scale": normalize(np.ones(len(entry.mean)), entry, form) - zero, "offset": zero}
        inputs = {"min": entry.low, "max": entry.high, "mean": entry.mean, "std": entry.std}
        tables[key] = numbers | {f"input_stats.{one}": value for one, value in inputs.items()}
    return {
        f"{_NORMALIZER}{key}.{one}": in_memory(np.asarray(value, np.float32).reshape(-1))
        for key, table in tables.items()
        for one, value in table.items()
    }


def config_of(model: DiffusionPolicyConfig, settings: JsonObject) -> dict[str, Any]:
    """The config of the trainer's `TrainDiffusionUnetImageWorkspace`, as far as building the policy needs it.

    Raises UsageError if it has no such policy.
    """
    problems = [
        f"its {field} is {getattr(model, field)}" for field, one in _MODEL.items() if getattr(model, field) != one
    ]
    if model.instructions:
        problems.append("it reads instructions")
    if settings.get(SAMPLER) is None:
        problems.append("it does not sample by diffusion")
    images = (tuple(model.image_mean), tuple(model.image_std))
    kinds = {False: _PLAIN, True: _TWICE}
    imagenet = next((name for name, pair in kinds.items() if np.allclose(pair, images, rtol=1e-5)), None)
    if imagenet is None and model.cameras:
        problems.append(f"it normalises images by mean {images[0]} and deviation {images[1]}")
    if not model.cameras:
        problems.append("it has no cameras")
    if tuple(model.encoder_widths) != WIDTHS:
        problems.append(f"its encoder_widths are {model.encoder_widths}")
    if problems:
        raise UsageError(
            f"this model is not one of diffusion_policy's: {'; '.join(problems)}. One that can be written is trained "
            f"by diffusion with the UNet, the mean feature of images, encoder_widths {WIDTHS}, and no instructions"
        )
    image = {"shape": [3, model.image_height, model.image_width], "type": "rgb"}
    state = {"shape": [model.used_state_dim], "type": "low_dim"}
    shapes = {
        "obs": {**dict.fromkeys(sorted(model.cameras), image), _STATE: state},
        "action": {"shape": [model.action_dim]},
    }
    scheduler = {"_target_": f"diffusers.schedulers.{_SCHEDULERS[settings[SAMPLER]]}"}
    scheduler |= schedule_of(settings)
    if settings[SAMPLER] == "ddpm":
        scheduler["variance_type"] = "fixed_small"
    else:
        scheduler |= {"set_alpha_to_one": True, "steps_offset": 0}
    crop = [settings.get(side) for side in CROP]
    encoder = {
        "_target_": "diffusion_policy.model.vision.multi_image_obs_encoder.MultiImageObsEncoder",
        "shape_meta": shapes,
        "rgb_model": {
            "_target_": "diffusion_policy.model.vision.model_getter.get_resnet",
            "name": "resnet18",
            "weights": None,
        },
        "resize_shape": None,
        "crop_shape": None if crop[0] is None else crop,
        "random_crop": True,
        "use_group_norm": True,
        "share_rgb_model": model.share_encoder,
        "imagenet_norm": imagenet,
    }
    sizes = {field: _listed(operator.attrgetter(ours)(model)) for field, ours in _EQUAL.items()}
    policy = {
        "_target_": "diffusion_policy.policy.diffusion_unet_image_policy.DiffusionUnetImagePolicy",
        "shape_meta": shapes,
        "noise_scheduler": scheduler,
        "obs_encoder": encoder,
        **sizes,
        **_FIXED,
        "num_inference_steps": settings.get(NUM_STEPS),
    }
    name = "train_diffusion_unet_image_workspace.TrainDiffusionUnetImageWorkspace"
    return {
        "_target_": f"diffusion_policy.workspace.{name}",
        "shape_meta": shapes,
        **{field: sizes[field] for field in ("horizon", "n_obs_steps", "n_action_steps")},
        "policy": policy,
        "training": {"seed": 0, "use_ema": True},
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-4, "betas": [0.95, 0.999]},
    }
