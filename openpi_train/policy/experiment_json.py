"""Restores an `Experiment` from its JSON (`experiment.as_json`). Read next: `interop/config_json.py`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openpi_train.data.files import read_json
from openpi_train.experiment import Experiment
from openpi_train.interop.config_json import classes_of, config_from_json
from openpi_train.runtime.exits import CheckpointError


def experiment_from_json(value: Mapping[str, Any], like: Experiment | None = None) -> Experiment:
    """The experiment that `as_json` stored; the classes of `like` are allowed in addition to the package's.

    Raises CheckpointError if a class or a field is unknown.
    """
    return config_from_json(value, Experiment, "experiment", classes_of(like))


def recorded_experiment(run: Path, like: Experiment | None = None) -> Experiment | None:
    """The experiment that a run's directory has recorded; None if there is no run. Errors: `experiment_from_json`."""
    file = run / "experiment.json"
    if not file.is_file():
        return None
    try:
        return experiment_from_json(read_json(file), like)
    except ValueError as error:
        raise CheckpointError(f"{file} cannot be read ({error}); put a copy back") from error
