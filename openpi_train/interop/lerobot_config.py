"""JSON files of LeRobot's policy folders: the policy's type and sizes, and the processing steps around the model.

Names of fields and steps, and defaults, are those of `lerobot` 0.6.1 (`policies/pi0/configuration_pi0.py`,
`processor_pi0.py` and similar files). Read next: `lerobot_policy.py`.
"""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from openpi_train.data.fast_tokenizer import PUBLISHED
from openpi_train.interop.openpi import published_params
from openpi_train.models.model_config import PolicyConfig
from openpi_train.runtime.exits import CheckpointError, UsageError

logger = logging.getLogger(__name__)

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


def policy_of(model: PolicyConfig) -> LeRobotPolicy:
    """The model's policy type in LeRobot. Raises UsageError if it has none."""
    params = published_params(model)
    for policy in POLICIES:
        if policy.has in params:
            return policy
    raise UsageError(f"{type(model).__name__} is not a policy of LeRobot; allowed: {_allowed()}")


def check(config: Mapping[str, Any], model: PolicyConfig, where: str) -> None:
    """Check that the folder's policy computes the same as the model. Raises CheckpointError with all differences."""
    policy, given = policy_of(model), config["type"]
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


def policy_config(policy: LeRobotPolicy, model: PolicyConfig, dims: Mapping[str, int], dtype: str) -> dict[str, Any]:
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


def processors(policy: LeRobotPolicy, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
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
