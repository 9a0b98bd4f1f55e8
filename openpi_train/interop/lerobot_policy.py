"""Reader and writer of LeRobot's policy folders, and all that is special to pi0, pi0.5 and pi0-FAST.

As `lerobot` 0.6.1 writes and reads them: names of fields and steps, and defaults, are its own
(`policies/pi0/configuration_pi0.py`, `processor_pi0.py` and similar files). Read next: `lerobot_folder.py` (the files),
`openpi_torch.py` (the tensors), `lerobot_act.py`, `lerobot_smolvla.py`.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from openpi_train.data.core.files import write_json
from openpi_train.data.tokenizers.fast_tokenizer import PUBLISHED
from openpi_train.interop import lerobot_act, lerobot_diffusion, lerobot_smolvla
from openpi_train.interop.lerobot_actions import norm_map_of, read_action_dims, relative_settings
from openpi_train.interop.lerobot_folder import (
    ABSOLUTE,
    BATCH,
    CONFIG,
    DEVICE,
    FEATURES,
    FORMS,
    NORMALIZE,
    PREFIX,
    RELATIVE,
    RENAME,
    TOKENIZE,
    UNNORMALIZE,
    feature,
    image_stats,
    norm_stats_of,
    policy_folder,
    read_stats,
    to_lerobot,
    write_processors,
)
from openpi_train.interop.openpi import published_params
from openpi_train.interop.openpi_torch import check_params, needed, read_params, write_params
from openpi_train.interop.place import Place
from openpi_train.interop.robot_actions import stored_action_dims
from openpi_train.interop.stored_leaves import Stored, Writer
from openpi_train.interop.trained_with import NORMALIZATION, Settings, settings_of
from openpi_train.models.act import ActConfig
from openpi_train.models.diffusion_policy import DiffusionPolicyConfig
from openpi_train.models.model_config import ModelConfig, PolicyConfig, as_policy
from openpi_train.models.smolvla import SmolVlaConfig
from openpi_train.runtime.exits import CheckpointError, UsageError
from openpi_train.types import OPENPI_SLOTS

logger = logging.getLogger(__name__)

_TOKENIZER = "google/paligemma-3b-pt-224"
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


_ACTIONS = "action_tokenizer_processor"
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
        cameras=OPENPI_SLOTS,
        steps=(RENAME, BATCH, "pi0_new_line_processor", TOKENIZE, DEVICE, RELATIVE, NORMALIZE),
        equal=_DIMS,
    ),
    LeRobotPolicy(
        type="pi05",
        has="time_mlp_in/kernel",
        cameras=OPENPI_SLOTS,
        steps=(RENAME, BATCH, RELATIVE, NORMALIZE, _PROMPT.format("pi05"), TOKENIZE, DEVICE),
        equal=_DIMS,
    ),
    LeRobotPolicy(
        type="pi0_fast",
        has="PaliGemma/llm/embedder/input_embedding",
        cameras=("base_0_rgb", "base_1_rgb", "wrist_0_rgb"),
        steps=(RENAME, BATCH, RELATIVE, NORMALIZE, _PROMPT.format("pi0_fast"), TOKENIZE, _ACTIONS, DEVICE),
        equal=_PIXELS,
        fields={**_FAST_TOKENIZERS, "max_action_tokens": 256},
    ),
)


def recognises(place: Place) -> bool:
    """Whether it is a policy's folder, of any type, or a checkpoint of LeRobot's training that contains one."""
    folder = policy_folder(place)
    if not folder.has(CONFIG):
        return False
    config = folder.json(CONFIG)
    return "type" in config and "input_features" in config


def open_checkpoint(place: Place, model: ModelConfig | None = None) -> Stored:
    """Open the policy's parameters by published name, and its norm stats. Raises CheckpointError if they do not fit."""
    folder = policy_folder(place)
    config = folder.json(CONFIG)
    model, where = as_policy(needed(model, folder)), str(folder)
    _check_type(config["type"], model, where)
    trained_with: Settings = {}
    if isinstance(model, DiffusionPolicyConfig):
        params, stats, trained_with = lerobot_diffusion.read(folder, config, model)
    elif isinstance(model, ActConfig):
        params, stats = lerobot_act.read(folder, config, model)
    elif isinstance(model, SmolVlaConfig):
        params, stats = lerobot_smolvla.read(folder, config, model)
    else:
        _check(config, model, where)
        params, stats = read_params(folder, model, PREFIX), read_stats(folder)
        trained_with = _trained_with(norm_map_of(folder, config))
    executed, own = config.get("n_action_steps"), model.window.num_executed
    if executed not in (None, own):
        logger.info("%s executes %d actions of a chunk, here %d: --execute %d", where, executed, own, executed)
    return Stored(
        where=where,
        format="lerobot",
        params=params,
        norm_stats=norm_stats_of(stats),
        trained_with=trained_with,
        action_dims=read_action_dims(folder, config),
    )


def write(directory: Path, stored: Stored, model: ModelConfig | None = None) -> None:
    """Check and write, as `prepare`."""
    prepare(stored, model)(directory)


def prepare(stored: Stored, model: ModelConfig | None = None) -> Writer:
    """The writer of a policy's folder, for `PI0Policy.from_pretrained` and similar. In one process.

    Raises UsageError if LeRobot has no such policy.
    """
    if model is None:
        raise UsageError("a policy's folder includes the model's sizes: give the experiment")
    if len(stored.norm_stats) > 1:
        raise UsageError(
            f"LeRobot's policies have one set of norm stats, {stored.where} has {', '.join(stored.norm_stats)}: "
            "convert a copy of it with one of these folders in assets/"
        )
    content = next(iter(stored.norm_stats.values()), None)
    stats = to_lerobot(content["norm_stats"]) if content else {}
    if not stats:
        logger.warning("%s has no norm stats: the policy's processors will not normalise values", stored.where)
    config, stats, steps, settings, write_tensors = _parts(stored, as_policy(model), stats)
    relative = relative_settings(stored_action_dims(stored), config)
    settings = {**settings, RELATIVE: relative, ABSOLUTE: {"enabled": relative["enabled"]}}
    if relative["enabled"]:
        config, steps = _with_relative_actions(config, steps, relative)

    def write(directory: Path) -> None:
        directory.mkdir(parents=True)
        write_tensors(directory)
        write_processors(directory, config, steps, settings, stats)
        write_json(directory / CONFIG, config)

    return write


_Steps = tuple[Sequence[str], Sequence[str]]
_Parts = tuple[
    dict[str, Any],
    Mapping[str, np.ndarray],
    _Steps,
    Mapping[str, Mapping[str, Any]],
    Writer,
]


def _parts(stored: Stored, policy: PolicyConfig, stats: Mapping[str, np.ndarray]) -> _Parts:
    """What a policy's folder holds: config, norm stats, steps around the model and their settings; tensors' writer."""
    params = stored.params
    known = settings_of(stored.experiment) if stored.experiment else stored.trained_with
    form = known.get(NORMALIZATION) or policy.normalization
    if isinstance(policy, DiffusionPolicyConfig):
        config = lerobot_diffusion.config_of(policy, known)
        stats = lerobot_diffusion.ranges_there(stats, FORMS[form])
        stats = {**stats, **image_stats(policy)}
        return (
            config,
            stats,
            lerobot_act.STEPS,
            {},
            lambda to: lerobot_diffusion.write_params(to, params, policy, config),
        )
    if isinstance(policy, ActConfig | SmolVlaConfig) and form != policy.normalization:
        raise UsageError(
            f"{stored.where} was trained with --data.normalization {form}, and such a policy of LeRobot's is read and "
            f"written here with {policy.normalization} alone: serve it here (`serve`), or train it so"
        )
    if isinstance(policy, ActConfig):
        config, stats = lerobot_act.config_of(policy), {**stats, **image_stats(policy)}
        return config, stats, lerobot_act.STEPS, {}, lambda to: lerobot_act.write_params(to, params, policy)
    if isinstance(policy, SmolVlaConfig):
        config = lerobot_smolvla.config_of(policy, stats)
        steps, settings = lerobot_smolvla.STEPS, lerobot_smolvla.settings(config)
        return config, stats, steps, settings, lambda to: lerobot_smolvla.write_params(to, params, policy)
    theirs, dtypes = _policy_of(policy), {str(leaf.dtype) for leaf in params.values()}
    check_params(params)
    config = _config_of(theirs, policy, stats, dtypes, FORMS[form])
    stats = lerobot_diffusion.ranges_there(stats, FORMS[form])
    steps = (theirs.steps, (UNNORMALIZE, ABSOLUTE, DEVICE))
    return config, stats, steps, _settings(config), lambda to: write_params(to, params, PREFIX)


def _with_relative_actions(
    config: Mapping[str, Any], steps: _Steps, relative: Mapping[str, Any]
) -> tuple[dict[str, Any], _Steps]:
    """The config and the steps of a policy whose actions are relative to the state: all types of LeRobot's run them.

    Only pi0 and its relatives also have fields for them, with which LeRobot trains on.
    """
    logger.warning(
        "the actions of this policy are relative to the state at a chunk's start: LeRobot 0.6.1 runs such a policy "
        "with --inference.type=rtc or its policy server; its lerobot-eval adds the state of each step instead"
    )
    before, after = (list(names) for names in steps)
    if RELATIVE not in before:
        before.insert(before.index(NORMALIZE), RELATIVE)
        after.insert(after.index(UNNORMALIZE) + 1, ABSOLUTE)
        return dict(config), (before, after)
    fields = {
        "use_relative_actions": True,
        "relative_exclude_joints": relative["exclude_joints"],
        "action_feature_names": relative["action_names"],
    }
    return {**config, **fields}, (before, after)


def _policy_of(model: PolicyConfig) -> LeRobotPolicy:
    """The model's policy type in LeRobot. Raises UsageError if it has none."""
    params = published_params(model)
    for policy in POLICIES:
        if policy.has in params:
            return policy
    raise UsageError(f"{type(model).__name__} is not a policy of LeRobot; allowed: {_allowed()}")


def _check_type(given: str, model: PolicyConfig, where: str) -> None:
    """Raise CheckpointError if the folder's policy, of the type `given`, is not of the model's type."""
    others = {
        ActConfig: lerobot_act.TYPE,
        SmolVlaConfig: lerobot_smolvla.TYPE,
        DiffusionPolicyConfig: lerobot_diffusion.TYPE,
    }
    own = others.get(type(model)) or _policy_of(model).type
    if given not in _types():
        raise CheckpointError(f"{where} holds a policy of type {given!r}; allowed: {_allowed()}")
    if given != own:
        raise CheckpointError(
            f"{where} holds a policy of type {given!r} and the model is {own!r}: give an experiment of {given}"
        )


def _check(config: Mapping[str, Any], model: PolicyConfig, where: str) -> None:
    """Check that the folder's policy computes the same as the model. Raises CheckpointError with all differences."""
    policy, problems = _policy_of(model), []
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
    form, asked = FORMS[model.normalization], config.get("normalization_mapping", {})
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


def _trained_with(norm_map: Mapping[str, str]) -> dict[str, Any]:
    """The fields of an experiment that the policy says, by dotted name: how states and actions are normalised."""
    used = {norm_map.get(kind) for kind in ("STATE", "ACTION")}
    if used == {None}:
        return {}
    form = next((name for name, theirs in FORMS.items() if used == {theirs}), None)
    return {NORMALIZATION: form or f"{norm_map.get('STATE')} of states and {norm_map.get('ACTION')} of actions"}


def _config_of(
    policy: LeRobotPolicy, model: PolicyConfig, stats: Mapping[str, np.ndarray], dtypes: set[str], form: str
) -> dict[str, Any]:
    """The `config.json` of a folder with weights of these `dtypes` and LeRobot's normalisation `form`.

    Dims are those of the norm stats, if there are.
    """
    dims = {name: len(stats[f"{key}.mean"]) for name, key in FEATURES.items() if f"{key}.mean" in stats}
    dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
    size, width = getattr(model, "image_size", 224), getattr(model, "action_dim", 32)
    variants = {
        field: str(getattr(model, field, default)).removesuffix("_lora")
        for field, default in zip(("paligemma_variant", "action_expert_variant"), _VARIANTS, strict=True)
    }
    if odd := [name for name in variants.values() if name not in _VARIANTS]:
        logger.warning("LeRobot supports only the experts %s, not %s: it will not load this folder", _VARIANTS, odd)
    fields, own = dict(policy.fields), getattr(model, "fast_tokenizer", PUBLISHED)
    if _ACTION_TOKENIZER in fields and own not in _PUBLISHED:
        fields[_ACTION_TOKENIZER] = own
        logger.warning("LeRobot will look for the FAST processor at %s: ship it too, and adjust the path", own)
    images = {f"observation.images.{camera}": feature("VISUAL", 3, size, size) for camera in policy.cameras}
    return {
        "type": policy.type,
        "n_obs_steps": 1,
        "input_features": {**images, "observation.state": feature("STATE", dims.get("state", width))},
        "output_features": {"action": feature("ACTION", dims.get("actions", width))},
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


def _settings(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The settings of the steps around pi0 and its relatives."""
    return {
        TOKENIZE: {
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
    }


def _types() -> list[str]:
    return [*(policy.type for policy in POLICIES), lerobot_act.TYPE, lerobot_smolvla.TYPE, lerobot_diffusion.TYPE]


def _allowed() -> str:
    return ", ".join(_types())
