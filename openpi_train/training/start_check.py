"""What is wrong with the files and packages that a start needs, before anything of a run is written.

Read next: `interop/weights.py`, `settle.py` and `rehearsal.py`, which call it.
"""

from openpi_train.experiment import Experiment
from openpi_train.interop.config_json import classes_of, config_from_json
from openpi_train.objectives.objective import Objective
from openpi_train.runtime.exits import CheckpointError, DataError, Together, UsageError, reported_as
from openpi_train.sampling.denoising import DenoisingSampler
from openpi_train.sampling.flow import FlowSampler
from openpi_train.training.metrics import require_writers
from openpi_train.training.rundir import begins


def check_files(given: Experiment, experiment: Experiment, together: Together) -> None:
    """Keep what is wrong with packages and start weights of `given`, as `experiment`."""
    with together:
        require_writers(tensorboard=experiment.tensorboard, wandb=experiment.wandb_enabled)
    with together:
        if begins(given):
            check_start_weights(experiment)


def examine_data(experiment: Experiment, together: Together) -> list[str]:
    """Keep what is soon found wrong with the data; returns what was not looked at."""
    with together, reported_as(DataError):
        return experiment.data.examine(experiment.model)
    return []


def check_start_weights(experiment: Experiment) -> None:
    """Raise CheckpointError for weights that the model cannot start from, as far as it is soon known.

    Raises UsageError for a policy whose law would read what it predicts as something else: noise as a velocity.
    """
    with reported_as(CheckpointError):
        experiment.weight_loader.check(experiment.model)
    if experiment.practice is None or (recorded := experiment.weight_loader.objective()) is None:
        return
    try:
        trained = config_from_json(recorded, Objective, "objective", classes_of(experiment.objective))
    except CheckpointError:  # a class of a file that this run does not name: it knows what it does
        return
    law = type(getattr(experiment.objective, "law", None)).__name__
    one, other = (type(getattr(objective, "action_sampler", None)) for objective in (trained, experiment.objective))
    if {one, other} == {FlowSampler, DenoisingSampler}:
        raise UsageError(
            f"--weight-loader.params-path was trained by {type(trained).__name__}, for a {one.__name__}, and the law "
            f"{law} acts by a {other.__name__}: what the policy predicts would be "
            "read as something else. Give the objective of practice the law of the training: DenoisingLaw after "
            "Diffusion, FlowLaw after FlowMatching"
        )
