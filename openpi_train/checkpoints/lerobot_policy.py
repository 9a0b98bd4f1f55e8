"""Reader and writer of LeRobot's policy folders, whatever the family of the policy.

As `lerobot` 0.6.1 writes and reads them. What is special to a family is in its `LeRobotForm`. Read next:
`interop/lerobot_form.py`, `interop/lerobot_folder.py` (the files), `models/act/lerobot_act.py`,
`models/pi0/lerobot_pi0.py`.
"""

import logging
from pathlib import Path
from typing import Any

from openpi_train import families
from openpi_train.data.core.files import write_json
from openpi_train.interop.lerobot_actions import read_action_dims, relative_settings
from openpi_train.interop.lerobot_folder import (
    ABSOLUTE,
    CONFIG,
    NORMALIZE,
    RELATIVE,
    UNNORMALIZE,
    norm_stats_of,
    policy_folder,
    to_lerobot,
    write_processors,
)
from openpi_train.interop.lerobot_form import LeRobotForm, Steps
from openpi_train.interop.openpi_torch import needed
from openpi_train.interop.place import Place
from openpi_train.interop.robot_actions import stored_action_dims
from openpi_train.interop.stored_leaves import Stored, Writer
from openpi_train.interop.trained_with import NORMALIZATION, settings_of
from openpi_train.json_object import JsonObject
from openpi_train.models.model_config import ModelConfig, PolicyConfig, as_policy
from openpi_train.runtime.exits import CheckpointError, UsageError

logger = logging.getLogger(__name__)


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
    form = _form_of(model)
    _check_type(config["type"], form.type_of(model), where)
    policy = form.read(folder, config, model)
    executed, own = config.get("n_action_steps"), model.rows.window.num_executed
    if executed not in (None, own):
        logger.info("%s executes %d actions of a chunk, here %d: --execute %d", where, executed, own, executed)
    return Stored(
        where=where,
        format="lerobot",
        params=policy.params,
        norm_stats=norm_stats_of(policy.stats),
        trained_with=policy.trained_with,
        action_dims=read_action_dims(folder, config, form.own_steps),
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
    policy = as_policy(model)
    known = settings_of(stored.experiment) if stored.experiment else stored.trained_with
    known = {**known, NORMALIZATION: known.get(NORMALIZATION) or policy.rows.normalization}
    parts = _form_of(policy).parts(stored, policy, stats, known)
    config, steps = parts.config, parts.steps
    relative = relative_settings(stored_action_dims(stored), config)
    settings = {**parts.settings, RELATIVE: relative, ABSOLUTE: {"enabled": relative["enabled"]}}
    if relative["enabled"]:
        config, steps = _with_relative_actions(config, steps, relative)

    def write(directory: Path) -> None:
        directory.mkdir(parents=True)
        parts.write_tensors(directory)
        write_processors(directory, config, steps, settings, parts.stats)
        write_json(directory / CONFIG, config)

    return write


def _with_relative_actions(config: JsonObject, steps: Steps, relative: JsonObject) -> tuple[dict[str, Any], Steps]:
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


def _form_of(model: PolicyConfig) -> LeRobotForm[Any]:
    """What the model's family says of its policies in LeRobot. Raises UsageError if LeRobot has none."""
    form = families.exchange_of(model).lerobot
    if form is None:
        raise UsageError(f"{type(model).__name__} is not a policy of LeRobot; allowed: {_allowed()}")
    return form


def _check_type(given: str, own: str, where: str) -> None:
    """Raise CheckpointError if the folder's policy, of the type `given`, is not of the model's type, `own`."""
    if given not in _types():
        raise CheckpointError(f"{where} holds a policy of type {given!r}; allowed: {_allowed()}")
    if given != own:
        raise CheckpointError(
            f"{where} holds a policy of type {given!r} and the model is {own!r}: give an experiment of {given}"
        )


def _types() -> list[str]:
    return [one for exchange in families.registered() if exchange.lerobot for one in exchange.lerobot.types]


def _allowed() -> str:
    return ", ".join(_types())
