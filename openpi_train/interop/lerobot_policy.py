"""Reader and writer of LeRobot's policy folders for pi0, pi0.5 and pi0-FAST.

    config.json                            the policy's type and sizes
    model.safetensors                      its tensors, with the prefix "model."
    policy_{pre,post}processor.json        the steps before and after the model, and the files of norm stats

As `lerobot` 0.6.1 writes and reads them: names of fields and steps, and defaults, are its own (`processor/pipeline.py`,
`policies/pi0/configuration_pi0.py`, `processor_pi0.py` and similar files). Read next: `openpi_torch.py` (the tensors).
"""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.data.fast_tokenizer import PUBLISHED
from openpi_train.data.files import write_json
from openpi_train.interop import safetensors_file
from openpi_train.interop.openpi import published_params
from openpi_train.interop.openpi_torch import needed, read_params, write_params
from openpi_train.interop.place import Place
from openpi_train.interop.stored_leaves import Leaves, Stored, in_memory
from openpi_train.models.model_config import ModelConfig, PolicyConfig, as_policy
from openpi_train.runtime.exits import CheckpointError, UsageError

logger = logging.getLogger(__name__)

PREFIX, ASSET_ID = "model.", "lerobot"
_CONFIG, _PREPROCESSOR = "config.json", "policy_preprocessor.json"
# The folder of the policy in a checkpoint of LeRobot's training.
_PRETRAINED = "pretrained_model"
_FEATURES = {"state": "observation.state", "actions": "action"}
_STATS = ("mean", "std", "q01", "q99")

_TOKENIZER = "google/paligemma-3b-pt-224"
_FORMS = {"z_score": "MEAN_STD", "quantile": "QUANTILES"}
# The only expert sizes that LeRobot builds.
_VARIANTS = ("gemma_2b", "gemma_300m")
# LeRobot's field, and ours that must be equal: for a policy that reads pixels, and one whose layers also have the dims.
_PIXELS = {"image_resolution": "image_size"}
_DIMS = {"max_action_dim": "action_dim", "max_state_dim": "action_dim", **_PIXELS}
# Fixed values in our models; a policy with other values computes something else.
_FIXED = {"min_period": 4e-3, "max_period": 4.0, "use_visual_memory": False, "use_proprioceptive_memory": False}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeRobotPolicy:
    """A policy type of LeRobot.

    Attributes:
        has: a published parameter that it has and the types after it do not have.
        cameras: openpi's names of its cameras.
        steps: names of the steps before the model, in order.
        equal: its fields, and the model's fields that must be equal.
        fields: fields of its config besides the common ones.
    """

    type: str
    has: str
    cameras: tuple[str, ...]
    steps: tuple[str, ...]
    equal: Mapping[str, str]
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_RENAME, _BATCH, _RELATIVE = "rename_observations_processor", "to_batch_processor", "relative_actions_processor"
_NORMALIZE, _TOKENIZE, _DEVICE = "normalizer_processor", "tokenizer_processor", "device_processor"
_UNNORMALIZE, _ABSOLUTE, _ACTIONS = "unnormalizer_processor", "absolute_actions_processor", "action_tokenizer_processor"
_CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
_PROMPT = "{}_prepare_state_tokenizer_processor_step"
_ACTION_TOKENIZER = "action_tokenizer_name"
# The same processor on the hub.
_PUBLISHED = (PUBLISHED, "lerobot/fast-action-tokenizer")
_FAST_TOKENIZERS = {"text_tokenizer_name": _TOKENIZER, _ACTION_TOKENIZER: _PUBLISHED[1]}

# A model's type is the first whose parameter it has.
POLICIES: tuple[LeRobotPolicy, ...] = (
    LeRobotPolicy(
        type="pi0",
        has="state_proj/kernel",
        cameras=_CAMERAS,
        steps=(_RENAME, _BATCH, "pi0_new_line_processor", _TOKENIZE, _DEVICE, _RELATIVE, _NORMALIZE),
        equal=_DIMS,
    ),
    LeRobotPolicy(
        type="pi05",
        has="time_mlp_in/kernel",
        cameras=_CAMERAS,
        steps=(_RENAME, _BATCH, _RELATIVE, _NORMALIZE, _PROMPT.format("pi05"), _TOKENIZE, _DEVICE),
        equal=_DIMS,
    ),
    LeRobotPolicy(
        type="pi0_fast",
        has="PaliGemma/llm/embedder/input_embedding",
        cameras=("base_0_rgb", "base_1_rgb", "wrist_0_rgb"),
        steps=(_RENAME, _BATCH, _RELATIVE, _NORMALIZE, _PROMPT.format("pi0_fast"), _TOKENIZE, _ACTIONS, _DEVICE),
        equal=_PIXELS,
        fields={**_FAST_TOKENIZERS, "max_action_tokens": 256},
    ),
)


def recognises(place: Place) -> bool:
    """Whether it is a policy's folder, of any type, or a checkpoint of LeRobot's training that contains one."""
    folder = _folder(place)
    if not folder.has(_CONFIG):
        return False
    config = folder.json(_CONFIG)
    return "type" in config and "input_features" in config


def open_checkpoint(place: Place, model: ModelConfig | None = None) -> Stored:
    """Open the policy's parameters by published name, and its norm stats. Raises CheckpointError if they do not fit."""
    folder = _folder(place)
    config = folder.json(_CONFIG)
    model = needed(model, folder)
    _check(config, as_policy(model), str(folder))
    return Stored(
        where=str(folder),
        format="lerobot",
        params=read_params(folder, model, PREFIX),
        norm_stats=_read_norm_stats(folder),
    )


def write(directory: Path, stored: Stored, model: ModelConfig | None = None) -> None:
    """Write a policy's folder, for `PI0Policy.from_pretrained` and similar. Call it in one process."""
    if model is None:
        raise UsageError("a policy's folder includes the model's sizes: give the experiment")
    if len(stored.norm_stats) > 1:
        raise UsageError(
            f"LeRobot's policies have one set of norm stats, {stored.where} has {', '.join(stored.norm_stats)}: "
            "convert a copy of it with one of these folders in assets/"
        )
    content = next(iter(stored.norm_stats.values()), None)
    stats = _to_lerobot(content["norm_stats"]) if content else {}
    if not stats:
        logger.warning("%s has no norm stats: the policy's processors will not normalise values", stored.where)
    dims = {name: len(stats[f"{feature}.mean"]) for name, feature in _FEATURES.items() if f"{feature}.mean" in stats}
    dtypes = {str(leaf.dtype) for leaf in stored.params.values()}
    policy = _policy_of(as_policy(model))
    dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
    config = _config_of(policy, as_policy(model), dims, dtype)
    directory.mkdir(parents=True)
    write_params(directory, stored.params, PREFIX)
    for name, pipeline in _processors(policy, config).items():
        for step in pipeline["steps"]:
            if not stats:
                step.pop("state_file", None)
            elif "state_file" in step:
                tensors = {key: in_memory(value) for key, value in stats.items()}
                safetensors_file.write_file(directory / step["state_file"], tensors)
        write_json(directory / f"{name}.json", pipeline)
    write_json(directory / _CONFIG, config)


def _folder(place: Place) -> Place:
    return place / _PRETRAINED if (place / _PRETRAINED).has(_CONFIG) else place


def _read_norm_stats(folder: Place) -> dict[str, Any]:
    """The norm stats of its normaliser, as in openpi's `norm_stats.json`; empty if it has none."""
    if not folder.has(_PREPROCESSOR):
        logger.warning("%s has no %s, so no norm stats", folder, _PREPROCESSOR)
        return {}
    steps = folder.json(_PREPROCESSOR).get("steps", [])
    files = [
        step["state_file"]
        for step in steps
        if step.get("registry_name") == "normalizer_processor" and "state_file" in step
    ]
    if not files:
        return {}
    if not folder.has(files[0]):
        raise CheckpointError(f"{folder} is incomplete: {files[0]}, which {_PREPROCESSOR} names, is missing; fetch it")
    stats = safetensors_file.open_file(folder, files[0])
    found = {name: _entry(stats, feature) for name, feature in _FEATURES.items() if f"{feature}.mean" in stats}
    return {ASSET_ID: {"norm_stats": found}} if found else {}


def _entry(stats: Leaves, feature: str) -> dict[str, list[float]]:
    return {key: stats[f"{feature}.{key}"].whole().tolist() for key in _STATS if f"{feature}.{key}" in stats}


def _to_lerobot(norm_stats: Mapping[str, Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """The norm stats by LeRobot's names, in float64; unknown quantiles are left out."""
    found = {}
    for name, entry in norm_stats.items():
        if name not in _FEATURES:
            raise UsageError(f"LeRobot's policies have no norm stats of {name!r}, only of {list(_FEATURES)}")
        for key in _STATS:
            values = np.asarray(entry[key] if entry.get(key) is not None else [np.nan], np.float64)
            if np.isfinite(values).all():
                found[f"{_FEATURES[name]}.{key}"] = values
    return found


def _policy_of(model: PolicyConfig) -> LeRobotPolicy:
    """The model's policy type in LeRobot. Raises UsageError if it has none."""
    params = published_params(model)
    for policy in POLICIES:
        if policy.has in params:
            return policy
    raise UsageError(f"{type(model).__name__} is not a policy of LeRobot; allowed: {_allowed()}")


def _check(config: Mapping[str, Any], model: PolicyConfig, where: str) -> None:
    """Check that the folder's policy computes the same as the model. Raises CheckpointError with all differences."""
    policy, given = _policy_of(model), config["type"]
    if given not in {one.type for one in POLICIES}:
        raise CheckpointError(f"{where} holds a policy of type {given!r}; allowed: {_allowed()}")
    if given != policy.type:
        raise CheckpointError(
            f"{where} holds a policy of type {given!r} and the model is {policy.type!r}: give an experiment of {given}"
        )
    problems = []
    if config.get("use_peft"):
        problems.append(
            "use_peft: its weights are adapters; merge them into the base policy first (peft's merge_and_unload)"
        )
    for field, value in _FIXED.items():
        if config.get(field, value) != value:
            problems.append(
                f"{field} is {config[field]!r}: the model here is built with {value!r}, choose another policy"
            )
    for field, ours in policy.equal.items():
        value, own = config.get(field), getattr(model, ours, None)
        value = value[0] if isinstance(value, list) and value else value
        if None not in (value, own) and value != own:
            problems.append(f"{field} is {value}: give --model.{ours.replace('_', '-')} {value} (here {own})")
    if problems:
        raise CheckpointError("\n".join([f"{where} does not fit the model:", *(f"  {text}" for text in problems)]))
    if (chunk := config.get("chunk_size", model.action_horizon)) != model.action_horizon:
        logger.warning("%s was trained on chunks of %d steps, the model has %d", where, chunk, model.action_horizon)
    form, asked = _FORMS[model.normalization], config.get("normalization_mapping", {})
    if odd := {kind: used for kind, used in asked.items() if kind in ("STATE", "ACTION") and used != form}:
        logger.warning("%s normalises by %s, the model here by %s: its actions are in other units", where, odd, form)
    theirs, own = config.get(_ACTION_TOKENIZER, PUBLISHED), getattr(model, "fast_tokenizer", PUBLISHED)
    if _ACTION_TOKENIZER in policy.fields and theirs != own and {theirs, own} != set(_PUBLISHED):
        logger.warning(
            "%s has the FAST processor %s, the model here %s: if they differ, set --model.fast-tokenizer",
            where,
            theirs,
            own,
        )


def _config_of(policy: LeRobotPolicy, model: PolicyConfig, dims: Mapping[str, int], dtype: str) -> dict[str, Any]:
    """The `config.json` of a folder with weights of `dtype`; `dims` are those of `state` and `actions`, if known."""
    size, width = getattr(model, "image_size", 224), getattr(model, "action_dim", 32)
    variants = {
        field: str(getattr(model, field, default)).removesuffix("_lora")
        for field, default in zip(("paligemma_variant", "action_expert_variant"), _VARIANTS, strict=True)
    }
    if odd := [name for name in variants.values() if name not in _VARIANTS]:
        logger.warning("LeRobot supports only the experts %s, not %s: it will not load this folder", _VARIANTS, odd)
    form = _FORMS[model.normalization]
    fields, own = dict(policy.fields), getattr(model, "fast_tokenizer", PUBLISHED)
    if _ACTION_TOKENIZER in fields and own not in _PUBLISHED:
        fields[_ACTION_TOKENIZER] = own
        logger.warning("LeRobot will look for the FAST processor at %s: ship it too, and adjust the path", own)
    images = {f"observation.images.{camera}": _feature("VISUAL", 3, size, size) for camera in policy.cameras}
    return {
        "type": policy.type,
        "n_obs_steps": 1,
        "input_features": {**images, "observation.state": _feature("STATE", dims.get("state", width))},
        "output_features": {"action": _feature("ACTION", dims.get("actions", width))},
        **variants,
        "dtype": dtype if dtype in ("float32", "bfloat16") else "float32",
        "chunk_size": model.action_horizon,
        "n_action_steps": model.action_horizon,
        "max_state_dim": width,
        "max_action_dim": width,
        "image_resolution": [size, size],
        "tokenizer_max_length": getattr(model, "prompt_limit", 200),
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": form, "ACTION": form},
        **fields,
    }


def _processors(policy: LeRobotPolicy, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The pipelines around the model, by file name without suffix."""
    features = {**config["input_features"], **config["output_features"]}
    # openpi's epsilon, with which the model was trained, not LeRobot's 1e-8.
    norm = {"eps": 1e-6, "norm_map": config["normalization_mapping"]}
    settings: Mapping[str, Mapping[str, Any]] = {
        _RENAME: {"rename_map": {}},
        _TOKENIZE: {
            "max_length": config["tokenizer_max_length"],
            "task_key": "task",
            "padding_side": "right",
            "padding": "max_length",
            "truncation": True,
            "tokenizer_name": _TOKENIZER,
        },
        _ACTIONS: {
            "trust_remote_code": True,
            "max_action_tokens": config.get("max_action_tokens"),
            _ACTION_TOKENIZER: config.get(_ACTION_TOKENIZER),
        },
        _DEVICE: {"device": "cpu", "float_dtype": None},
        _RELATIVE: {"enabled": False, "exclude_joints": ["gripper"], "action_names": None},
        _NORMALIZE: {**norm, "features": features},
        _UNNORMALIZE: {**norm, "features": config["output_features"]},
        _ABSOLUTE: {"enabled": False},
    }

    def pipeline(name: str, steps: tuple[str, ...]) -> dict[str, Any]:
        made: list[dict[str, Any]] = [{"registry_name": step, "config": dict(settings.get(step, {}))} for step in steps]
        for place, step in enumerate(made):
            if step["registry_name"] in (_NORMALIZE, _UNNORMALIZE):
                step["state_file"] = f"{name}_step_{place}_{step['registry_name']}.safetensors"
        return {"name": name, "steps": made}

    steps = {"policy_preprocessor": policy.steps, "policy_postprocessor": (_UNNORMALIZE, _ABSOLUTE, _DEVICE)}
    return {name: pipeline(name, these) for name, these in steps.items()}


def _feature(kind: str, *shape: int) -> dict[str, Any]:
    return {"type": kind, "shape": list(shape)}


def _allowed() -> str:
    return ", ".join(policy.type for policy in POLICIES)
