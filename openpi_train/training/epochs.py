"""A run's length in passes over its samples, as optimizer steps. Read next: `start.py`, which asks."""

import contextlib
import dataclasses
import logging
import math
from collections.abc import Iterator

import jax

from openpi_train.experiment import Experiment
from openpi_train.runtime import agree
from openpi_train.runtime.exits import DataError, reported_as
from openpi_train.runtime.phases import phase

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def process_0_first(what: str, timeout_s: float) -> Iterator[None]:
    """Around what process 0 makes and the others find: they enter when it has left. Every process must call it."""
    if jax.process_index() != 0:
        agree.barrier(f"process 0 {what}", timeout_s)
    yield
    if jax.process_index() == 0:
        agree.barrier(f"process 0 {what}", timeout_s)


@phase("counting the samples")
def in_steps(experiment: Experiment) -> Experiment:
    """The experiment with `num_train_steps` for its `num_epochs`, where it has any. Every process must call it."""
    if experiment.num_epochs is None or not experiment.numbers_are_in_range:
        return experiment  # the check that follows says what is out of range
    with process_0_first("has counted the samples", experiment.timeouts.data_s), reported_as(DataError):
        samples = experiment.data.num_samples(experiment.model)
    steps = max(math.ceil(experiment.num_epochs * samples / experiment.batch_size), 1)
    logger.info(
        "%d epochs of %d samples, %d at a time: %d steps", experiment.num_epochs, samples, experiment.batch_size, steps
    )
    return dataclasses.replace(experiment, num_train_steps=steps)
