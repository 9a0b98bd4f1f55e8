"""Restores an `Experiment` from its JSON (`experiment.as_json`). Read next: `interop/config_json.py`."""

import dataclasses
from collections.abc import Mapping

from openpi_train.experiment import Experiment
from openpi_train.former_names import present_config
from openpi_train.interop.config_json import classes_of, config_from_json
from openpi_train.json_object import JsonObject
from openpi_train.models.model_config import ModelConfig


def experiment_from_json(
    value: Mapping[str, object], like: Experiment | None = None, left_out: list[str] | None = None
) -> Experiment:
    """The experiment that `as_json` stored; the classes of `like` are allowed in addition to the package's.

    Raises CheckpointError if a class or a field is unknown; with `left_out` (`config_from_json`) only for a class.
    """
    return config_from_json(present_config(value), Experiment, "experiment", classes_of(like), left_out)


def with_recorded_model(experiment: Experiment, said: JsonObject | None) -> Experiment:
    """`experiment` with the model that a run of the same experiment has recorded in `said`, its flags among it.

    The same if nothing is recorded, or another experiment or kind of model. Errors: `experiment_from_json`.
    """
    own = experiment.model
    if said is None or (said["name"], said["model"]["__class__"]) != (experiment.name, type(own).__name__):
        return experiment
    model = config_from_json(said["model"], ModelConfig, "experiment.model", classes_of(own))
    return dataclasses.replace(experiment, model=model)
