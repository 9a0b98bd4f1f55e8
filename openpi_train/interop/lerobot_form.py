"""`LeRobotForm`: what a family of policies says of itself in LeRobot's terms: types, tensors, config, steps.

Read next: `checkpoints/lerobot_policy.py`, which reads and writes the folders; `lerobot_folder.py`, what all have in
common.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from openpi_train.interop.place import Place
from openpi_train.interop.stored_leaves import Leaves, Stored, Writer
from openpi_train.interop.trained_with import NORMALIZATION, Settings
from openpi_train.models.model_config import PolicyConfig
from openpi_train.runtime.exits import UsageError

# Names of the steps before and after a model, in order.
Steps = tuple[Sequence[str], Sequence[str]]
PolicyT = TypeVar("PolicyT", bound=PolicyConfig)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadPolicy:
    """What is read of a policy's folder.

    Attributes:
        params: the parameters by published name.
        stats: the statistics of its normaliser, by LeRobot's names (`lerobot_folder.read_stats`).
        trained_with: the fields of an experiment that it says, by dotted name.
    """

    params: Leaves
    stats: Leaves
    trained_with: Settings = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyParts:
    """What is written into a policy's folder.

    Attributes:
        config: the content of `config.json`.
        stats: the norm stats, by LeRobot's names.
        steps: the steps around the model.
        write_tensors: writes `model.safetensors` into a folder.
        settings: the settings of steps that are not the same for all policies, by the step's name.
    """

    config: dict[str, Any]
    stats: Mapping[str, np.ndarray]
    steps: Steps
    write_tensors: Writer
    settings: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeRobotForm(Generic[PolicyT]):
    """A family's policies as LeRobot has them.

    Attributes:
        types: LeRobot's types of these policies.
        type_of: the type of the policy that a model is.
        read: what a folder with this config, of the model's type, holds. Raises CheckpointError with all that the
            policy computes otherwise than the model.
        parts: what a folder holds of a checkpoint of the model, given its norm stats by LeRobot's names and how it was
            trained, the form of normalisation among it. Raises UsageError if LeRobot has no such policy.
        own_steps: names of steps around the model that only such policies have, and that models here do as LeRobot.
    """

    types: tuple[str, ...]
    type_of: Callable[[PolicyT], str]
    read: Callable[[Place, Mapping[str, Any], PolicyT], ReadPolicy]
    parts: Callable[[Stored, PolicyT, Mapping[str, np.ndarray], Settings], PolicyParts]
    own_steps: frozenset[str] = frozenset()


def require_own_normalization(where: str, model: PolicyConfig, settings: Settings) -> None:
    """Raise UsageError if a checkpoint was trained with another normalisation than its model was designed for.

    Of policies that LeRobot and we read and write with that one alone. `settings` are how it was trained.
    """
    if (form := settings[NORMALIZATION]) != model.rows.normalization:
        raise UsageError(
            f"{where} was trained with --data.normalization {form}, and such a policy of LeRobot's is read and "
            f"written here with {model.rows.normalization} alone: serve it here (`serve`), or train it so"
        )
