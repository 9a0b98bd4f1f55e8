"""Restores an `Experiment` from its JSON (`experiment.as_json`). Read next: `interop/config_json.py`."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openpi_train.data.core.files import read_json
from openpi_train.experiment import Experiment
from openpi_train.former_names import present_config
from openpi_train.interop.config_json import classes_of, config_from_json
from openpi_train.models.model_config import ModelConfig
from openpi_train.runtime.exits import CheckpointError


def experiment_from_json(
    value: Mapping[str, Any], like: Experiment | None = None, left_out: list[str] | None = None
) -> Experiment:
    """The experiment that `as_json` stored; the classes of `like` are allowed in addition to the package's.

    Raises CheckpointError if a class or a field is unknown; with `left_out` (`config_from_json`) only for a class.
    """
    return config_from_json(present_config(value), Experiment, "experiment", classes_of(like), left_out)


def with_recorded_model(experiment: Experiment, said: Mapping[str, Any] | None) -> Experiment:
    """`experiment` with the model that a run of the same experiment has recorded in `said`, its flags among it.

    The same if nothing is recorded, or another experiment or kind of model. Errors: `experiment_from_json`.
    """
    own = experiment.model
    if said is None or (said["name"], said["model"]["__class__"]) != (experiment.name, type(own).__name__):
        return experiment
    model = config_from_json(said["model"], ModelConfig, "experiment.model", classes_of(own))
    return dataclasses.replace(experiment, model=model)


def recorded_json(run: Path) -> Mapping[str, Any] | None:
    """What a run's directory has recorded of its experiment, as `as_json` stores it; None if there is no run.

    Raises CheckpointError if the file is damaged.
    """
    file = run / "experiment.json"
    if not file.is_file():
        return None
    try:
        found = read_json(file)
    except ValueError as error:
        raise CheckpointError(f"{file} cannot be read ({error}); put a copy back") from error
    if not isinstance(found, Mapping) or found.get("__class__") != Experiment.__name__:
        raise CheckpointError(f"{file} is no record of an experiment; put a copy back")
    return present_config(found)
