"""LeRobot's ACT: the names and layouts of its tensors, its config, and the statistics of its images.

As `lerobot` 0.6.1 has them (`policies/act`). Read next: `lerobot_policy.py`, which reads and writes its folders, and
`torch_names.py` for how a row of the table is read.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.interop import safetensors_file
from openpi_train.interop.lerobot_folder import (
    BATCH,
    CAMERA,
    DEVICE,
    NORMALIZE,
    PREFIX,
    RENAME,
    UNNORMALIZE,
    differences,
    feature,
    image_problems,
    image_stats,
    old_stats,
    read_stats,
)
from openpi_train.interop.lerobot_form import LeRobotForm, PolicyParts, ReadPolicy, require_own_normalization
from openpi_train.interop.openpi_torch import OLD_STATS, joined_params, layouts_of
from openpi_train.interop.place import Place
from openpi_train.interop.stored_leaves import Leaves, Stored, in_memory
from openpi_train.interop.torch_names import TensorLayout, lay_out_tensors, tensors_of
from openpi_train.interop.trained_with import Settings
from openpi_train.json_object import JsonObject
from openpi_train.models.act.act import ActConfig
from openpi_train.models.act.act_network import sine_table
from openpi_train.nn.resnet import BLOCKS
from openpi_train.runtime.exits import CheckpointError, UsageError

logger = logging.getLogger(__name__)

TYPE = "act"
# The steps before and after the model.
STEPS = ((RENAME, BATCH, DEVICE, NORMALIZE), (UNNORMALIZE, DEVICE))
# A fixed table that LeRobot keeps among the tensors.
_POSITIONS = "vae_encoder_pos_enc"
# LeRobot's fields that are ours, too.
_SIZES = ("dim_model", "n_heads", "dim_feedforward", "n_encoder_layers", "n_decoder_layers", "use_vae", "latent_dim")
_EQUAL = {**{name: name for name in _SIZES}, "n_vae_encoder_layers": "n_vae_encoder_layers"}
_EQUAL |= {"chunk_size": "action_horizon"}
# Fixed here: another value computes something else.
_FIXED = {"vision_backbone": "resnet18", "pre_norm": False, "feedforward_activation": "relu"}
_FIXED |= {"replace_final_stride_with_dilation": False, "n_obs_steps": 1}

_LINEAR = {"kernel": ("weight", "i o -> o i"), "bias": ("bias", "o -> o")}
_CONV = {"kernel": ("weight", "y x i o -> o i y x"), "bias": ("bias", "o -> o")}
_NORM = {"norm/scale": ("weight", "d -> d"), "norm/bias": ("bias", "d -> d")}
_FIXED_NORM = {"scale": "weight", "bias": "bias", "mean": "running_mean", "variance": "running_var"}


def _layer(here: str, there: str, attentions: Mapping[str, str], num_norms: int) -> Iterator[tuple[str, str, str]]:
    """The parameters of a stack of transformer layers."""
    there = f"{there}.layers.{{layer}}."
    for own, name in attentions.items():
        yield f"{here}/{own}/project/kernel", f"{there}{name}.in_proj_weight", "i o -> o i"
        yield f"{here}/{own}/project/bias", f"{there}{name}.in_proj_bias", "o -> o"
        yield from _part(f"{here}/{own}/output", f"{there}{name}.out_proj", _LINEAR)
    for own, name in (("mlp/up", "linear1"), ("mlp/down", "linear2")):
        yield from _part(f"{here}/{own}", f"{there}{name}", _LINEAR)
    for number in range(1, num_norms + 1):
        yield from _part(f"{here}/norm_{number}", f"{there}norm{number}", _NORM)


def _part(here: str, there: str, names: Mapping[str, tuple[str, str]]) -> Iterator[tuple[str, str, str]]:
    return ((f"{here}/{own}", f"{there}.{name}", dims) for own, (name, dims) in names.items())


def _rows() -> Iterator[tuple[str, str, str]]:
    yield from _layer("vae_layers", "vae_encoder", {"attention": "self_attn"}, 2)
    yield from _layer("encoder", "encoder", {"attention": "self_attn"}, 2)
    yield from _layer("decoder", "decoder", {"among": "self_attn", "across": "multihead_attn"}, 3)
    yield from _part("decoder_norm", "decoder.norm", _NORM)
    linears = {"vae_state": "vae_encoder_robot_state_input_proj", "vae_action": "vae_encoder_action_input_proj"}
    linears |= {"vae_latent": "vae_encoder_latent_output_proj", "state": "encoder_robot_state_input_proj"}
    linears |= {"latent": "encoder_latent_input_proj", "action": "action_head"}
    for here, there in linears.items():
        yield from _part(here, there, _LINEAR)
    yield from _part("image", "encoder_img_feat_input_proj", _CONV)
    tables = {"vae_token": "vae_encoder_cls_embed", "token_positions": "encoder_1d_feature_pos_embed"}
    for here, there in {**tables, "action_positions": "decoder_pos_embed"}.items():
        yield here, f"{there}.weight", "t d -> t d"


_TABLE: Mapping[str, tuple[str, str]] = {here: (there, dims) for here, there, dims in _rows()}


def backbone_tensor(name: str) -> str:
    """torchvision's name of a parameter of a ResNet-18, given by its path in `nn/resnet.py: ResNet18`."""
    name = re.sub(r"blocks/(\d+)", lambda found: "layer{}.{}".format(*_stage_and_block(int(found[1]))), name)
    for own, theirs in (("stem_norm", "bn1"), ("shortcut_norm", "downsample.1"), ("norm_", "bn"), ("conv_", "conv")):
        name = name.replace(own, theirs)
    name = name.replace("shortcut", "downsample.0").replace("stem", "conv1")
    *parts, last = name.split("/")
    return ".".join([*parts, "weight" if last == "kernel" else _FIXED_NORM[last]])


def backbone_layout(name: str, shape: tuple[int, ...]) -> TensorLayout:
    """The layout of a parameter of the backbone. Raises KeyError if torchvision's ResNet-18 has none."""
    dims = _CONV["kernel"][1] if len(shape) == 4 else "d -> d"
    return lay_out_tensors(backbone_tensor(name), dims, shape)


def _stage_and_block(number: int) -> tuple[int, int]:
    return number // BLOCKS + 1, number % BLOCKS


def layout(name: str, shape: tuple[int, ...]) -> TensorLayout:
    """The layout of a parameter. Raises KeyError if LeRobot's ACT has none."""
    root, _, rest = name.partition("/")
    if root == "backbone":
        layout = backbone_layout(rest, shape)
        return lay_out_tensors(
            f"backbone.{layout.tensors[()]}", _CONV["kernel"][1] if len(shape) == 4 else "d -> d", shape
        )
    return lay_out_tensors(*_TABLE[name], shape)


def check(config: JsonObject, model: ActConfig, stats: Leaves, where: str) -> None:
    """Check that the folder's policy computes the same as the model. Raises CheckpointError with all differences."""
    problems = differences(config, model, _FIXED, _EQUAL, "ACT")
    problems += _check_features(config, model) + image_problems(model, stats)
    forms = config.get("normalization_mapping", {})
    if odd := {kind: form for kind, form in forms.items() if kind in ("STATE", "ACTION") and form != "MEAN_STD"}:
        problems.append(f"it normalises by {odd}: ACT here by mean and standard deviation (MEAN_STD)")
    if problems:
        raise CheckpointError("\n".join([f"{where} does not fit the model:", *(f"  {text}" for text in problems)]))
    if (rate := config.get("temporal_ensemble_coeff")) is not None:
        logger.info("%s acts with temporal ensembling: eval --ensemble %s --execute 1 does the same", where, rate)


def _check_features(config: JsonObject, model: ActConfig) -> list[str]:
    """What of inputs and outputs is not the model's."""
    inputs, problems = config["input_features"], []
    cameras = {name.removeprefix(CAMERA): entry for name, entry in inputs.items() if entry["type"] == "VISUAL"}
    if len(cameras) != len(model.cameras):
        problems.append(f"it has the cameras {', '.join(cameras)}: give --model.cameras {' '.join(cameras)}")
    elif set(cameras) != set(model.cameras):
        # All cameras share the backbone, and no token says from which it is.
        logger.info("its cameras %s are %s here", ", ".join(cameras), ", ".join(model.cameras))
    size = [3, model.image_height, model.image_width]
    if odd := {name: entry["shape"] for name, entry in cameras.items() if list(entry["shape"]) != size}:
        logger.warning("its images are %s (colours, rows, columns), the model's %s: it sees other sizes", odd, size)
    if others := [name for name in inputs if name not in ("observation.state", *(CAMERA + one for one in cameras))]:
        problems.append(f"it reads {', '.join(others)} beside images and state: ACT here does not")
    if "observation.state" not in inputs:
        problems.append("it reads no state, and ACT here does: choose another policy")
    return problems


def read(folder: Place, config: JsonObject, model: ActConfig) -> ReadPolicy:
    """The parameters and norm stats of a policy's folder.

    Raises CheckpointError if the policy does not fit the model, or a tensor is missing, unknown, or of another shape.
    """
    found = {name.removeprefix(PREFIX): leaf for name, leaf in safetensors_file.open_model(folder).items()}
    stats = old_stats(found, config) or read_stats(folder)
    check(config, model, stats, str(folder))
    # The fixed table is computed here.
    tensors = {name: leaf for name, leaf in found.items() if name != _POSITIONS and not name.startswith(OLD_STATS)}
    return ReadPolicy(params=joined_params(folder, tensors, layouts_of(model, layout), model), stats=stats)


def parts(stored: Stored, model: ActConfig, stats: Mapping[str, np.ndarray], settings: Settings) -> PolicyParts:
    """What a policy's folder holds. Raises UsageError if LeRobot has no such policy."""
    require_own_normalization(stored.where, model, settings)
    return PolicyParts(
        config=config_of(model),
        stats={**stats, **image_stats(model)},
        steps=STEPS,
        write_tensors=lambda directory: write_params(directory, stored.params, model),
    )


def write_params(directory: Path, params: Leaves, model: ActConfig) -> None:
    """Write `model.safetensors` for strict loading by LeRobot."""
    with tensors_of(params, directory, layout) as tensors:
        if model.use_vae:
            table = sine_table(2 + model.action_horizon, model.dim_model)[None]
            tensors[_POSITIONS] = in_memory(table.astype(next(iter(tensors.values())).dtype))
        safetensors_file.write_file(
            directory / safetensors_file.FILE,
            {f"{PREFIX}{name}": tensor for name, tensor in sorted(tensors.items())},
            metadata={"format": "pt"},
        )


def config_of(model: ActConfig) -> dict[str, Any]:
    """The `config.json`, without what is left to LeRobot's defaults. Raises UsageError if the model has no cameras."""
    if not model.cameras:
        raise UsageError("LeRobot's ACT reads at least one image, and this model has no cameras: it cannot be written")
    if model.backbone_widths != (whole := ActConfig().backbone_widths):
        logger.warning(
            "LeRobot does not load this folder: the backbone of its ACT has the widths %s, this model's %s. "
            "Train with --model.backbone-widths %s",
            *(" ".join(map(str, widths)) for widths in (whole, model.backbone_widths, whole)),
        )
    image = feature("VISUAL", 3, model.image_height, model.image_width)
    images = {f"{CAMERA}{slot}": image for slot in model.cameras}
    kinds = ("VISUAL", "STATE", "ACTION")
    return {
        "type": TYPE,
        "n_obs_steps": 1,
        "input_features": {**images, "observation.state": feature("STATE", model.used_state_dim)},
        "output_features": {"action": feature("ACTION", model.action_dim)},
        "n_action_steps": model.action_horizon,
        "normalization_mapping": dict.fromkeys(kinds, "MEAN_STD"),
        **_FIXED,
        "pretrained_backbone_weights": None,
        **{field: getattr(model, ours) for field, ours in _EQUAL.items()},
        "temporal_ensemble_coeff": None,
        "dropout": model.dropout,
    }


LEROBOT = LeRobotForm(types=(TYPE,), type_of=lambda _: TYPE, read=read, parts=parts)
