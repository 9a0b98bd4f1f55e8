"""The steps around a LeRobot policy's model that say what its actions are: as read, and as written.

As `lerobot` 0.6.1 has them (`processor/relative_action_processor.py`, `policies/factory.py`) for all types of
policies: actions relative to the state at a chunk's start, and dims that are left absolute, by name. Read next:
`lerobot_folder.py`; `robot_actions.py`, for what robots do.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from openpi_train.interop.lerobot_folder import (
    ABSOLUTE,
    BATCH,
    DEVICE,
    FEATURES,
    NORMALIZE,
    POSTPROCESSOR,
    PREPROCESSOR,
    RELATIVE,
    RENAME,
    TOKENIZE,
    UNNORMALIZE,
)
from openpi_train.interop.place import Place
from openpi_train.interop.robot_actions import ActionDims, numbered
from openpi_train.json_object import JsonObject
from openpi_train.runtime.exits import CheckpointError, UsageError

Steps = Sequence[tuple[str, Mapping[str, Any]]]
# Steps that change no number of a state or action, or change it as the models here do, whatever the policy.
_KNOWN = {RENAME, BATCH, DEVICE, NORMALIZE, UNNORMALIZE, TOKENIZE, RELATIVE, ABSOLUTE}


def read_action_dims(folder: Place, config: JsonObject, own_steps: Collection[str] = frozenset()) -> ActionDims | None:
    """Which actions of the folder's policy are relative to the state; None if it has no processors.

    `own_steps` are the names of steps that such a policy has beside the common ones.

    Raises CheckpointError for steps that are not known here, and for those that contradict each other or the config.
    """
    if not folder.has(PREPROCESSOR):
        if config.get("use_relative_actions"):
            raise CheckpointError(
                f"{folder} is incomplete: its config says use_relative_actions, and {PREPROCESSOR} is missing; fetch it"
            )
        return None
    before, after = (_steps(folder, file) for file in (PREPROCESSOR, POSTPROCESSOR))
    problems = [
        f"{file} has the step {name!r}, which is not done here: a policy without it can be read"
        for file, steps in ((PREPROCESSOR, before), (POSTPROCESSOR, after))
        for name, _ in steps
        if name not in _KNOWN and name not in own_steps
    ]
    relative, absolute = (
        next((settings for name, settings in steps if name == wanted and settings.get("enabled")), None)
        for steps, wanted in ((before, RELATIVE), (after, ABSOLUTE))
    )
    problems += _contradictions(config, before, after, relative is not None, absolute is not None)
    if problems:
        raise CheckpointError("\n".join([f"{folder} cannot be read:", *(f"  {text}" for text in problems)]))
    (width,) = config["output_features"]["action"]["shape"]
    if relative is None:
        return ActionDims.absolute(width)
    names, excluded = relative.get("action_names"), relative.get("exclude_joints") or ()
    mask = _lerobots_mask(names, excluded, width)
    named = tuple(names) if names is not None and len(names) == width else numbered(width)
    return ActionDims(names=named, relative=mask)


def _steps(folder: Place, file: str) -> Steps:
    """The steps of a pipeline, each by name with its settings; none if the file is not there."""
    steps = folder.json(file).get("steps", []) if folder.has(file) else []
    return [(str(step.get("registry_name") or step.get("class")), step.get("config", {})) for step in steps]


def norm_map_of(folder: Place, config: JsonObject) -> Mapping[str, str]:
    """How the policy normalises states and actions: as its normaliser says, else as its config does."""
    return {
        **config.get("normalization_mapping", {}),
        **next(
            (settings.get("norm_map", {}) for name, settings in _steps(folder, PREPROCESSOR) if name == NORMALIZE), {}
        ),
    }


def _contradictions(config: JsonObject, before: Steps, after: Steps, relative: bool, absolute: bool) -> list[str]:
    """Where the steps around the model, and its config, say different things of the policy's states and actions."""
    problems = []
    if relative is not absolute:
        said = {True: "enabled", False: "not enabled"}
        problems.append(f"its {RELATIVE} is {said[relative]}, its {ABSOLUTE} {said[absolute]}: set both alike")
    elif config.get("use_relative_actions", relative) is not relative:
        problems.append(
            f"its config says use_relative_actions {config['use_relative_actions']}, its steps say {relative}: set "
            "both alike"
        )
    for steps, one, other in ((before, RELATIVE, NORMALIZE), (after, UNNORMALIZE, ABSOLUTE)):
        order = [name for name, _ in steps if name in (one, other)]
        if relative and order == [other, one]:
            problems.append(f"its {one} comes after its {other}: here it is the other way round")
    for name, settings in (*before, *after):
        keys = settings.get("normalize_observation_keys")
        if name in (NORMALIZE, UNNORMALIZE) and keys is not None and FEATURES["state"] not in keys:
            problems.append(f"its {name} leaves {FEATURES['state']} as it is: here states are normalised")
    return problems


def _lerobots_mask(names: Sequence[str] | None, excluded: Sequence[str], width: int) -> tuple[bool, ...]:
    """Which of `width` dims LeRobot takes relative: all without names, else those whose name contains none excluded."""
    if names is None:
        return (True,) * width
    tokens = [token.lower() for token in excluded if token]
    found = [not any(token in name.lower() for token in tokens) for name in names[:width]]
    return (*found, *(True for _ in range(width - len(found))))


def relative_settings(actions: ActionDims | None, config: JsonObject) -> dict[str, Any]:
    """The settings of the step that takes actions relative, which excludes dims by name, `enabled` among them.

    Raises UsageError if LeRobot's cannot: it adds the state's dim at the same place.
    """
    if actions is None or not any(actions.relative):
        return {"enabled": False, "exclude_joints": ["gripper"], "action_names": None}
    (width,) = config["output_features"]["action"]["shape"]
    (state_width,) = config["input_features"]["observation.state"]["shape"]
    if width != len(actions.relative) or state_width < width:
        raise UsageError(
            f"the robot's actions are {actions.in_words()}, {len(actions.relative)} dims; the policy has {width}, and "
            f"its state {state_width}: LeRobot's step needs a state of at least as many dims, and norm stats of just "
            "these (--norm-stats)"
        )
    for names in (actions.names, numbered(width)):
        excluded = [name for name, relative in zip(names, actions.relative, strict=True) if not relative]
        if _lerobots_mask(names, excluded, width) == actions.relative:
            return {"enabled": True, "exclude_joints": excluded, "action_names": list(names)}
    raise AssertionError("numbered names exclude what they name")
