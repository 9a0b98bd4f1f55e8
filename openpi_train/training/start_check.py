"""What is wrong with start weights, before anything of a run is written. Read next: `interop/weights.py`."""

from openpi_train.experiment import Experiment
from openpi_train.interop.config_json import classes_of, config_from_json
from openpi_train.objectives.objective import Objective
from openpi_train.runtime.exits import CheckpointError, UsageError, reported_as
from openpi_train.sampling.denoising import DenoisingSampler
from openpi_train.sampling.flow import FlowSampler


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
