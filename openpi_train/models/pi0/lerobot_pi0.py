"""LeRobot's pi0 and pi0.5, and what its pi0-FAST has in common with them: config, steps around the model, tensors.

As `lerobot` 0.6.1 writes and reads them: names of fields and steps, and defaults, are its own
(`policies/pi0/configuration_pi0.py`, `processor_pi0.py` and similar files). Read next: `interop/openpi_torch.py` (the
tensors), `models/pi0_fast/lerobot_pi0_fast.py`.
"""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from openpi_train.interop.lerobot_actions import norm_map_of
from openpi_train.interop.lerobot_folder import (
    ABSOLUTE,
    BATCH,
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
    ranges_there,
    read_stats,
)
from openpi_train.interop.lerobot_form import LeRobotForm, PolicyParts, ReadPolicy
from openpi_train.interop.openpi_torch import check_params, read_params, write_params
from openpi_train.interop.place import Place
from openpi_train.interop.stored_leaves import Stored
from openpi_train.interop.trained_with import NORMALIZATION, Settings
from openpi_train.json_object import JsonObject
from openpi_train.models.pi0.pi0 import Pi0Config
from openpi_train.models.prompted import GemmaPolicyConfig
from openpi_train.runtime.exits import CheckpointError
from openpi_train.types import OPENPI_SLOTS

logger = logging.getLogger(__name__)

TOKENIZER = "google/paligemma-3b-pt-224"
# The only expert sizes that LeRobot builds.
VARIANTS = ("gemma_2b", "gemma_300m")
# LeRobot's field, and ours that must be equal: for a policy that reads pixels, and one whose layers also have the dims.
PIXELS = {"image_resolution": "image_size"}
_DIMS = {"max_action_dim": "action_dim", "max_state_dim": "action_dim", **PIXELS}
# Fixed values in our models; a policy with other values computes something else.
_FIXED = {"min_period": 4e-3, "max_period": 4.0, "use_visual_memory": False, "use_proprioceptive_memory": False}
_NEW_LINE, _STATE_PROMPT = "pi0_new_line_processor", "pi05_prepare_state_tokenizer_processor_step"
AFTER = (UNNORMALIZE, ABSOLUTE, DEVICE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmaPolicyType:
    """A policy type of LeRobot on PaliGemma's layers.

    Attributes:
        cameras: openpi's names of its cameras.
        steps: names of the steps before the model, in order.
        equal: its fields, and the model's fields that must be equal.
    """

    type: str
    cameras: tuple[str, ...]
    steps: tuple[str, ...]
    equal: Mapping[str, str]


_PI0 = GemmaPolicyType(
    type="pi0",
    cameras=OPENPI_SLOTS,
    steps=(RENAME, BATCH, _NEW_LINE, TOKENIZE, DEVICE, RELATIVE, NORMALIZE),
    equal=_DIMS,
)
_PI05 = GemmaPolicyType(
    type="pi05",
    cameras=OPENPI_SLOTS,
    steps=(RENAME, BATCH, RELATIVE, NORMALIZE, _STATE_PROMPT, TOKENIZE, DEVICE),
    equal=_DIMS,
)


def _policy_of(model: Pi0Config) -> GemmaPolicyType:
    return _PI05 if model.pi05 else _PI0


def _read(folder: Place, config: JsonObject, model: Pi0Config) -> ReadPolicy:
    check(config, model, _policy_of(model).equal, str(folder))
    return read_policy(folder, config, model)


def read_policy(folder: Place, config: JsonObject, model: GemmaPolicyConfig) -> ReadPolicy:
    """The parameters and norm stats of a policy's folder, and how it was trained. Raises CheckpointError as
    `read_params`."""
    params, stats = read_params(folder, model, PREFIX), read_stats(folder)
    return ReadPolicy(params=params, stats=stats, trained_with=_trained_with(norm_map_of(folder, config)))


def check(config: JsonObject, model: GemmaPolicyConfig, equal: Mapping[str, str], where: str) -> None:
    """Check that the folder's policy computes the same as the model. Raises CheckpointError with all differences."""
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
    for field, ours in equal.items():
        value, own = config.get(field), getattr(model, ours)
        value = value[0] if isinstance(value, list) and value else value
        if value is not None and value != own:
            problems.append(f"{field} is {value}: give --model.{ours.replace('_', '-')} {value} (here {own})")
    if problems:
        raise CheckpointError("\n".join([f"{where} does not fit the model:", *(f"  {text}" for text in problems)]))
    if (chunk := config.get("chunk_size", model.action_horizon)) != model.action_horizon:
        logger.warning("%s was trained on chunks of %d steps, the model has %d", where, chunk, model.action_horizon)
    form, asked = FORMS[model.rows.normalization], config.get("normalization_mapping", {})
    if odd := {kind: used for kind, used in asked.items() if kind in ("STATE", "ACTION") and used != form}:
        logger.warning("%s normalises by %s, the model here by %s: its actions are in other units", where, odd, form)


def _trained_with(norm_map: Mapping[str, str]) -> dict[str, Any]:
    """The fields of an experiment that the policy says, by dotted name: how states and actions are normalised."""
    used = {norm_map.get(kind) for kind in ("STATE", "ACTION")}
    if used == {None}:
        return {}
    form = next((name for name, theirs in FORMS.items() if used == {theirs}), None)
    return {NORMALIZATION: form or f"{norm_map.get('STATE')} of states and {norm_map.get('ACTION')} of actions"}


def _parts(stored: Stored, model: Pi0Config, stats: Mapping[str, np.ndarray], settings: Settings) -> PolicyParts:
    variants = {"paligemma_variant": model.paligemma_variant, "action_expert_variant": model.action_expert_variant}
    policy = _policy_of(model)
    config = config_of(policy, model, stored, stats, settings, variants, model.prompt_limit)
    return parts_of(policy, stored, stats, settings, config)


def parts_of(
    policy: GemmaPolicyType,
    stored: Stored,
    stats: Mapping[str, np.ndarray],
    settings: Settings,
    config: dict[str, Any],
) -> PolicyParts:
    """What a policy's folder with this `config` holds. Raises UsageError as `check_params`."""
    check_params(stored.params)
    tokenize = {"max_length": config["tokenizer_max_length"], "task_key": "task", "padding_side": "right"}
    tokenize |= {"padding": "max_length", "truncation": True, "tokenizer_name": TOKENIZER}
    return PolicyParts(
        config=config,
        stats=ranges_there(stats, FORMS[settings[NORMALIZATION]]),
        steps=(policy.steps, AFTER),
        settings={TOKENIZE: tokenize},
        write_tensors=lambda directory: write_params(directory, stored.params, PREFIX),
    )


def config_of(
    policy: GemmaPolicyType,
    model: GemmaPolicyConfig,
    stored: Stored,
    stats: Mapping[str, np.ndarray],
    settings: Settings,
    variants: Mapping[str, str],
    prompt_limit: int,
) -> dict[str, Any]:
    """The `config.json` of a folder with the experts of these `variants`. Dims are those of the norm stats, if there
    are."""
    dims = {name: len(stats[f"{key}.mean"]) for name, key in FEATURES.items() if f"{key}.mean" in stats}
    dtypes = {str(leaf.dtype) for leaf in stored.params.values()}
    dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
    form, size, width = FORMS[settings[NORMALIZATION]], model.image_size, model.action_dim
    variants = {field: variant.removesuffix("_lora") for field, variant in variants.items()}
    if odd := [name for name in variants.values() if name not in VARIANTS]:
        logger.warning("LeRobot supports only the experts %s, not %s: it will not load this folder", VARIANTS, odd)
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
        "tokenizer_max_length": prompt_limit,
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": form, "ACTION": form},
    }


LEROBOT = LeRobotForm(
    types=(_PI0.type, _PI05.type),
    type_of=lambda model: _policy_of(model).type,
    read=_read,
    parts=_parts,
    own_steps=frozenset({_NEW_LINE, _STATE_PROMPT}),
)
