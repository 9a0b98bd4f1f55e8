"""LeRobot's SmolVLA: the names and layouts of its tensors, and its config.

As `lerobot` 0.6.1 has them (`policies/smolvla`), with transformers' names of SmolVLM's parts. Its tensors are more than
compute anything: the language model's last norm and head, and all but keys and values of its last layer, are kept as
they are. Read next: `lerobot_policy.py`, which reads and writes its folders, and `huggingface.py` for the language
model's layers.
"""

import dataclasses
import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.interop import safetensors_file
from openpi_train.interop.lerobot_folder import (
    BATCH,
    DEVICE,
    FEATURES,
    NORMALIZE,
    PREFIX,
    RENAME,
    TOKENIZE,
    UNNORMALIZE,
    differences,
    feature,
    read_stats,
)
from openpi_train.interop.lerobot_form import LeRobotForm, PolicyParts, ReadPolicy, require_own_normalization
from openpi_train.interop.openpi_torch import joined_params, layouts_of
from openpi_train.interop.place import Place
from openpi_train.interop.stored_leaves import Leaves, Stored
from openpi_train.interop.torch_names import TensorLayout, lay_out_tensors, tensors_of
from openpi_train.interop.trained_with import Settings
from openpi_train.json_object import JsonObject
from openpi_train.models.language.hf_names import hf_name
from openpi_train.models.language.huggingface import hf_layout
from openpi_train.models.smolvla.smolvla import SmolVlaConfig
from openpi_train.runtime.exits import CheckpointError

logger = logging.getLogger(__name__)

TYPE, _NEW_LINE = "smolvla", "smolvla_new_line_processor"
# The steps before and after the model.
STEPS = (
    (RENAME, BATCH, _NEW_LINE, TOKENIZE, DEVICE, NORMALIZE),
    (UNNORMALIZE, DEVICE),
)
# The cameras of the published policy, `lerobot/smolvla_base`: the first is that of a run's first slot, by name.
_CAMERAS = tuple(f"observation.images.camera{number}" for number in (1, 2, 3))
# The only model whose sizes our defaults are; LeRobot reads those of others from the hub.
_VLM = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"
# LeRobot's fields, and ours that must be equal.
_EQUAL = {
    "chunk_size": "action_horizon",
    "max_state_dim": "action_dim",
    "max_action_dim": "action_dim",
    "num_vlm_layers": "num_vlm_layers",
    "self_attn_every_n_layers": "self_attn_every_n_layers",
    "expert_width_multiplier": "expert_width_multiplier",
}
# Fields that decide what trains, which differ between a policy and its fine-tuning.
_TRAINED = ("freeze_vision_encoder", "train_expert_only", "train_state_proj")
# Fixed here: another value computes something else.
_FIXED = {"attention_mode": "cross_attn", "add_image_special_tokens": False, "min_period": 4e-3, "max_period": 4.0}
_FIXED |= {"adapt_to_pi_aloha": False, "n_obs_steps": 1}

_VISION, _LANGUAGE = "vlm_with_expert.vlm.model.vision_model.", "vlm_with_expert.vlm.model.text_model."
_EXPERT, _HEAD = "vlm_with_expert.lm_expert.", "vlm_with_expert.vlm.lm_head.weight"
_LINEAR = {"kernel": ("weight", "i o -> o i"), "bias": ("bias", "o -> o")}
_NORM = {"scale": ("weight", "d -> d"), "bias": ("bias", "d -> d")}
_INTO_HEADS = {"kernel": ("weight", "d n h -> (n h) d"), "bias": ("bias", "n h -> (n h)")}
_FROM_HEADS = {"kernel": ("weight", "n h d -> d (n h)"), "bias": ("bias", "d -> d")}
_BLOCK = {
    "attention_norm": ("layer_norm1", _NORM),
    "attention/query": ("self_attn.q_proj", _INTO_HEADS),
    "attention/key": ("self_attn.k_proj", _INTO_HEADS),
    "attention/value": ("self_attn.v_proj", _INTO_HEADS),
    "attention/out": ("self_attn.out_proj", _FROM_HEADS),
    "mlp_norm": ("layer_norm2", _NORM),
    "mlp/up": ("mlp.fc1", _LINEAR),
    "mlp/down": ("mlp.fc2", _LINEAR),
}
_PROJECTIONS = ("state_proj", "action_in_proj", "action_out_proj", "action_time_mlp_in", "action_time_mlp_out")
_PARTS = {
    "image_encoder/patch_embedding": (
        f"{_VISION}embeddings.patch_embedding",
        {"kernel": ("weight", "y x c d -> d c y x"), "bias": ("bias", "d -> d")},
    ),
    "image_encoder/norm": (f"{_VISION}post_layernorm", _NORM),
    "connector": ("vlm_with_expert.vlm.model.connector.modality_projection.proj", _LINEAR),
    "expert_norm": (f"{_EXPERT}norm", _NORM),
    **{
        f"image_encoder/layers/{own}": (f"{_VISION}encoder.layers.{{layer}}.{name}", kind)
        for own, (name, kind) in _BLOCK.items()
    },
    **{name: (name, _LINEAR) for name in _PROJECTIONS},
}
_TABLE: Mapping[str, tuple[str, str]] = {
    "image_encoder/position_embedding": (f"{_VISION}embeddings.position_embedding.weight", "i n d -> (i n) d"),
    **{
        f"{own}/{leaf}": (f"{there}.{name}", dims)
        for own, (there, kind) in _PARTS.items()
        for leaf, (name, dims) in kind.items()
    },
}


def layout(model: SmolVlaConfig, name: str, shape: tuple[int, ...]) -> TensorLayout:
    """The layout of a parameter of the model. Raises KeyError if LeRobot's SmolVLA has none."""
    root, _, rest = name.partition("/")
    if root == "language":
        found = hf_layout(hf_name(rest, model.language), shape)
        return _renamed(found, lambda there, _: _HEAD if there == "lm_head.weight" else _LANGUAGE + there)
    if root == "expert":
        # Layers of our groups are counted one after the other there.
        kind, _, rest = rest.partition("/")
        within = 0
        if kind == "across":
            number, _, rest = rest.partition("/")
            within = int(number) + 1

        def of_layer(there: str, place: tuple[int, ...]) -> str:
            layer = place[0] * model.self_attn_every_n_layers + within
            return _EXPERT + there.replace(f"layers.{place[0]}.", f"layers.{layer}.", 1)

        return _renamed(hf_layout(hf_name(f"layers/{rest}", model.expert), shape), of_layer)
    return lay_out_tensors(*_TABLE[name], shape)


def _renamed(layout: TensorLayout, name: Any) -> TensorLayout:
    """The layout with other names: `name` of a language model's tensor without its "model.", and of its place."""
    tensors = {place: name(there.removeprefix(PREFIX), place) for place, there in layout.tensors.items()}
    return dataclasses.replace(layout, tensors=tensors)


def check(config: JsonObject, model: SmolVlaConfig, where: str) -> None:
    """Check that the folder's policy computes the same as the model. Raises CheckpointError with all differences."""
    problems = differences(config, model, _FIXED, _EQUAL, "SmolVLA")
    size, wanted = config.get("resize_imgs_with_padding", [512, 512]), [model.image_size] * 2
    if size is None or size[0] != size[1]:
        problems.append(f"resize_imgs_with_padding is {size}: the images of SmolVLA here are squares")
    elif list(size) != wanted:
        problems.append(f"resize_imgs_with_padding is {size}: give --model.image-size {size[0]} (here {wanted[0]})")
    if (layers := config.get("num_expert_layers", -1)) > 0 and layers != model.num_vlm_layers:
        problems.append(f"num_expert_layers is {layers}: the expert here has as many layers as the language model")
    if config.get("use_peft"):
        problems.append(
            "use_peft: its weights are adapters; merge them into the base policy first (peft's merge_and_unload)"
        )
    forms = config.get("normalization_mapping", {})
    if odd := {kind: form for kind, form in forms.items() if kind in ("STATE", "ACTION") and form != "MEAN_STD"}:
        problems.append(f"it normalises by {odd}: SmolVLA here by mean and standard deviation (MEAN_STD)")
    if forms.get("VISUAL", "IDENTITY") != "IDENTITY":
        problems.append(f"it normalises images by {forms['VISUAL']}: SmolVLA here only scales them to [-1, 1]")
    if problems:
        raise CheckpointError("\n".join([f"{where} does not fit the model:", *(f"  {text}" for text in problems)]))
    cameras = [name for name, entry in config["input_features"].items() if entry["type"] == "VISUAL"]
    logger.info("%s reads its cameras in the order %s; here in that of their slots' names", where, ", ".join(cameras))
    if (steps := config.get("num_steps", 10)) != 10:
        logger.info("%s samples in %d denoising steps: --num-sample-steps %d does the same", where, steps, steps)


def read(folder: Place, config: JsonObject, model: SmolVlaConfig) -> ReadPolicy:
    """The parameters and norm stats of a policy's folder.

    Raises CheckpointError if the policy does not fit the model, or a tensor is missing, unknown, or of another shape.
    """
    check(config, model, str(folder))
    found = {name.removeprefix(PREFIX): leaf for name, leaf in safetensors_file.open_model(folder).items()}
    layouts = layouts_of(model, functools.partial(layout, model))
    return ReadPolicy(params=joined_params(folder, found, layouts, model), stats=read_stats(folder))


def parts(stored: Stored, model: SmolVlaConfig, stats: Mapping[str, np.ndarray], settings: Settings) -> PolicyParts:
    """What a policy's folder holds. Raises UsageError if LeRobot has no such policy."""
    require_own_normalization(stored.where, model, settings)
    config = config_of(model, stats)
    return PolicyParts(
        config=config,
        stats=stats,
        steps=STEPS,
        settings=settings_of_steps(config),
        write_tensors=lambda directory: write_params(directory, stored.params, model),
    )


def write_params(directory: Path, params: Leaves, model: SmolVlaConfig) -> None:
    """Write `model.safetensors` for strict loading by LeRobot."""
    with tensors_of(params, directory, functools.partial(layout, model)) as tensors:
        safetensors_file.write_file(
            directory / safetensors_file.FILE,
            {f"{PREFIX}{name}": tensor for name, tensor in sorted(tensors.items())},
            metadata={"format": "pt"},
        )


def config_of(model: SmolVlaConfig, stats: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The `config.json`, without what is left to LeRobot's defaults; dims are those of the norm stats, if there are."""
    dims = {name: len(stats[f"{key}.mean"]) for name, key in FEATURES.items() if f"{key}.mean" in stats}
    if not _is_published(model):
        logger.warning(
            "LeRobot reads the sizes of the language model from the hub, and these are not those of %s: set "
            "vlm_model_name to a model with these sizes before it loads this folder",
            _VLM,
        )
    image = feature("VISUAL", 3, model.image_size, model.image_size)
    return {
        "type": TYPE,
        "input_features": {
            **dict.fromkeys(_CAMERAS, image),
            "observation.state": feature("STATE", dims.get("state", model.action_dim)),
        },
        "output_features": {"action": feature("ACTION", dims.get("actions", model.action_dim))},
        "n_action_steps": model.action_horizon,
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
        "resize_imgs_with_padding": [model.image_size, model.image_size],
        "tokenizer_max_length": model.max_token_len,
        **{field: getattr(model, ours) for field, ours in _EQUAL.items()},
        **{field: getattr(model, field) for field in _TRAINED},
        **_FIXED,
        "vlm_model_name": _VLM,
        "load_vlm_weights": False,
        "num_expert_layers": -1,
    }


def settings_of_steps(config: JsonObject) -> dict[str, Mapping[str, Any]]:
    """The settings of the steps around the model that are its own."""
    tokenize = {"max_length": config["tokenizer_max_length"], "task_key": "task", "padding_side": "right"}
    return {TOKENIZE: {**tokenize, "padding": "longest", "truncation": True, "tokenizer_name": _VLM}}


def _is_published(model: SmolVlaConfig) -> bool:
    own = SmolVlaConfig()
    language = dataclasses.replace(own.language, depth=model.num_vlm_layers)
    return (model.language, model.siglip, model.pixel_shuffle) == (language, own.siglip, own.pixel_shuffle)


LEROBOT = LeRobotForm(types=(TYPE,), type_of=lambda _: TYPE, read=read, parts=parts, own_steps=frozenset({_NEW_LINE}))
