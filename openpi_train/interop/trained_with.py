"""What another trainer's policy says of its training beside the model: fields of an experiment, by dotted name.

Read next: `lerobot_diffusion.py`, which reads and writes them.
"""

from collections.abc import Mapping
from typing import Any

from openpi_train.fields import as_json
from openpi_train.interop.lerobot_folder import flag_of
from openpi_train.interop.stored_leaves import Stored
from openpi_train.json_object import JsonObject
from openpi_train.runtime.exits import UsageError

Settings = Mapping[str, Any]
# The noise schedule of a diffusion policy, and its fields.
SCHEDULE = "objective.noise_schedule"
SCHEDULE_FIELDS = ("num_train_timesteps", "beta_schedule", "beta_start", "beta_end")
SCHEDULE_FIELDS += ("prediction_type", "clip_sample", "clip_sample_range")
SAMPLER, NORMALIZATION, NUM_STEPS = "objective.sampler", "data.normalization", "eval.num_sample_steps"
CROP = ("objective.augmentation.height", "objective.augmentation.width")
_FIELDS = (*(f"{SCHEDULE}.{field}" for field in SCHEDULE_FIELDS), SAMPLER, NORMALIZATION, NUM_STEPS, *CROP)


def settings_of(experiment: JsonObject) -> dict[str, Any]:
    """The fields of an experiment's JSON of which diffusion policies tell; None where it has no such field."""
    return {name: _field(experiment, name) for name in _FIELDS}


def schedule_of(settings: Settings) -> dict[str, Any]:
    """The fields of the noise schedule that these settings say, by their own names, which are diffusers'."""
    named = {field: f"{SCHEDULE}.{field}" for field in SCHEDULE_FIELDS}
    return {field: settings[name] for field, name in named.items() if name in settings}


def _field(value: object, dotted: str) -> Any:
    for name in dotted.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def other_settings(trained_with: Settings, experiment: JsonObject, normalization: str) -> list[str]:
    """What an experiment's JSON has otherwise than a policy was trained with, as sentences with the flags to give.

    `normalization` is that of the model, where the experiment names none.
    """
    problems = []
    for name, value in trained_with.items():
        given = _field(experiment, name)
        given = normalization if given is None and name == NORMALIZATION else given
        if given != value:
            problems.append(f"{name} is {value}: give {_advice(name, value, given)} (here {given})")
    return problems


def check_same_training(stored: Stored, experiment: Any) -> None:
    """Raise UsageError if another trainer's policy says that it was trained otherwise than the Experiment trains."""
    if not stored.trained_with:
        return
    if problems := other_settings(stored.trained_with, as_json(experiment), experiment.policy.rows.normalization):
        listing = "\n".join(f"  {problem}" for problem in problems)
        raise UsageError(f"{stored.where} was trained otherwise than the experiment says:\n{listing}")


def _advice(name: str, value: object, given: object) -> str:
    """What to give so that the field has the value in place of the given one."""
    if name in CROP and None in (value, given):
        return "an experiment " + ("without RandomCrop" if value is None else f"with a RandomCrop of this {name[-6:]}")
    flag = flag_of(name, value)
    return f"an experiment whose objective is diffusion, with {flag}" if given is None else flag
