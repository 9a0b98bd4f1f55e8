"""LeRobot's pi0-FAST: what it has beside pi0's config and steps, for the tokens of its actions.

As `lerobot` 0.6.1 writes and reads it (`policies/pi0_fast`). Read next: `models/pi0/lerobot_pi0.py`.
"""

import dataclasses
import logging
from collections.abc import Mapping

import numpy as np

from openpi_train.data.tokenizers.fast_tokenizer import PUBLISHED
from openpi_train.interop.lerobot_folder import BATCH, DEVICE, NORMALIZE, RELATIVE, RENAME, TOKENIZE
from openpi_train.interop.lerobot_form import LeRobotForm, PolicyParts, ReadPolicy
from openpi_train.interop.place import Place
from openpi_train.interop.stored_leaves import Stored
from openpi_train.interop.trained_with import Settings
from openpi_train.json_object import JsonObject
from openpi_train.models.pi0.lerobot_pi0 import (
    PIXELS,
    TOKENIZER,
    VARIANTS,
    GemmaPolicyType,
    check,
    config_of,
    parts_of,
    read_policy,
)
from openpi_train.models.pi0_fast.pi0_fast import Pi0FastConfig

logger = logging.getLogger(__name__)

_STATE_PROMPT, _ACTIONS = "pi0_fast_prepare_state_tokenizer_processor_step", "action_tokenizer_processor"
_ACTION_TOKENIZER = "action_tokenizer_name"
# The same processor on the hub.
_PUBLISHED = (PUBLISHED, "lerobot/fast-action-tokenizer")
_MOST_ACTION_TOKENS = 256
# Its prompts have no limit of their own here: a row's text has one.
_PROMPT_LIMIT = 200
_POLICY = GemmaPolicyType(
    type="pi0_fast",
    cameras=("base_0_rgb", "base_1_rgb", "wrist_0_rgb"),
    steps=(RENAME, BATCH, RELATIVE, NORMALIZE, _STATE_PROMPT, TOKENIZE, _ACTIONS, DEVICE),
    equal=PIXELS,
)


def _read(folder: Place, config: JsonObject, model: Pi0FastConfig) -> ReadPolicy:
    check(config, model, _POLICY.equal, str(folder))
    theirs, own = config.get(_ACTION_TOKENIZER, PUBLISHED), model.fast_tokenizer
    if theirs != own and {theirs, own} != set(_PUBLISHED):
        logger.warning(
            "%s has the FAST processor %s, the model here %s: if they differ, set --model.fast-tokenizer",
            folder,
            theirs,
            own,
        )
    return read_policy(folder, config, model)


def _parts(stored: Stored, model: Pi0FastConfig, stats: Mapping[str, np.ndarray], settings: Settings) -> PolicyParts:
    processor = _PUBLISHED[1] if model.fast_tokenizer in _PUBLISHED else model.fast_tokenizer
    if processor not in _PUBLISHED:
        logger.warning("LeRobot will look for the FAST processor at %s: ship it too, and adjust the path", processor)
    variants = {"paligemma_variant": model.paligemma_variant, "action_expert_variant": VARIANTS[1]}
    fields = {"text_tokenizer_name": TOKENIZER, _ACTION_TOKENIZER: processor, "max_action_tokens": _MOST_ACTION_TOKENS}
    config = config_of(_POLICY, model, stored, stats, settings, variants, _PROMPT_LIMIT) | fields
    parts = parts_of(_POLICY, stored, stats, settings, config)
    tokens = {"trust_remote_code": True, "max_action_tokens": _MOST_ACTION_TOKENS, _ACTION_TOKENIZER: processor}
    return dataclasses.replace(parts, settings={**parts.settings, _ACTIONS: tokens})


LEROBOT = LeRobotForm(
    types=(_POLICY.type,),
    type_of=lambda _: _POLICY.type,
    read=_read,
    parts=_parts,
    own_steps=frozenset({_STATE_PROMPT, _ACTIONS}),
)
