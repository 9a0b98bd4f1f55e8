"""The length of a run in epochs, as optimizer steps, also where the batch size changes on the way."""

import dataclasses
import inspect
import math
import types

import pytest
from openpi_train_configs.debug import debug

from openpi_train.training import settling

DATA = types.SimpleNamespace(num_samples=100)


def steps_of(batch_size, begun=None):
    in_steps = inspect.unwrap(settling._in_steps)  # without the run-time type check: it is given no real data
    return in_steps(3, dataclasses.replace(debug, batch_size=batch_size), DATA, begun)


@pytest.mark.parametrize("step", [0, 1, 20, 37])
def test_a_run_that_goes_on_as_it_was_has_the_length_that_it_had(step):
    assert steps_of(8) == math.ceil(300 / 8) == steps_of(8, (step, {"step": step, "batch_size": 8}))


def test_another_batch_size_takes_the_rows_that_are_left():
    """After 10 steps of 8 rows, 220 of 300 are left; after 5 more of 32, 60."""
    assert steps_of(32, (10, {"step": 10, "batch_size": 8})) == 10 + 7
    assert steps_of(4, (15, {"step": 15, "batch_size": 32, "rows": 240})) == 15 + 15
    assert steps_of(4, (40, {"step": 40, "batch_size": 8})) == 40, "more than three epochs are done"
