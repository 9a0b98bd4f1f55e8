"""Restores an `Experiment` from its JSON (`experiment.as_json`). Read next: `interop/config_json.py`."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from openpi_train import registry
from openpi_train.experiment import Experiment
from openpi_train.former_names import present_config
from openpi_train.interop.config_json import classes_of, config_from_json
from openpi_train.json_object import JsonObject
from openpi_train.models.model_config import ModelConfig
from openpi_train.runtime.exits import CheckpointError
from openpi_train.training.run_record import own_experiment


def experiment_from_json(
    value: Mapping[str, object], like: Experiment | None = None, left_out: list[str] | None = None
) -> Experiment:
    """The experiment that `as_json` stored; the classes of `like` are allowed in addition to the package's.

    Raises CheckpointError if a class or a field is unknown; with `left_out` (`config_from_json`) only for a class.
    """
    return config_from_json(present_config(value), Experiment, "experiment", classes_of(like), left_out)


def experiment_of_run(
    value: Mapping[str, object], where: str | Path, given: Experiment | None = None, left_out: list[str] | None = None
) -> Experiment:
    """The experiment that a run has recorded as `value`; `where` is its directory, or a checkpoint in it.

    Classes of the user's are those of `given`; if that is None, of the file that the run was started with, if that is
    still there. Errors: `experiment_from_json`, `registry.load`.
    """
    file = _file_of(where) if given is None else None
    is_there = file is not None and Path(file.partition(":")[0]).is_file()
    like = registry.load(file, any_dims=True) if file is not None and is_there else given
    try:
        return experiment_from_json(value, like, left_out)
    except CheckpointError as error:
        if file is None or is_there:
            raise
        raise CheckpointError(f"{error}. The run was started with {file}, which is not there") from error


def _file_of(where: str | Path) -> str | None:
    """The experiment of the user's with which the run at `where`, or around it, was started."""
    path = Path(where).expanduser()  # a bucket's address is no folder here
    folders = (path, *path.absolute().parents[:2])
    run = next((one for one in folders if (one / "environment.json").is_file()), None)
    return None if run is None else own_experiment(run)


def with_recorded_model(experiment: Experiment, said: JsonObject | None) -> Experiment:
    """`experiment` with the model that a run of the same experiment has recorded in `said`, its flags among it.

    The same if nothing is recorded, or another experiment or kind of model. Errors: `experiment_from_json`.
    """
    own = experiment.model
    if said is None or (said["name"], said["model"]["__class__"]) != (experiment.name, type(own).__name__):
        return experiment
    model = config_from_json(said["model"], ModelConfig, "experiment.model", classes_of(own))
    return dataclasses.replace(experiment, model=model)
