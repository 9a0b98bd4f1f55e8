"""Entries of rollouts that stay in their process: what two processes hold is what one would."""

import numpy as np
import pytest

from openpi_train.rl.local_columns import LocalColumns, joined_columns

EVERYTHING = np.arange(12) * 10


def held(rows):
    """What a process with these of four rows holds of twelve rollouts."""
    columns = {"seen": EVERYTHING.reshape(3, 4)[:, rows]}
    return LocalColumns(rows=np.array(rows), batch_size=4, columns=columns)


@pytest.mark.parametrize("numbers", [[4, 9, 2, 3], [8, 1, 6, 11, 0, 5, 10, 7]])
@pytest.mark.parametrize("shares", [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0, 3], [1, 2]]])
def test_processes_take_their_own_of_the_same_rollouts(numbers, shares):
    found = np.zeros((len(numbers) // 4, 4), int)
    for rows in shares:
        found[:, rows] = held(rows).taken(np.array(numbers)).columns["seen"]
    assert found.ravel().tolist() == EVERYTHING[numbers].tolist()


def test_an_rollout_in_another_row_is_a_mistake():
    with pytest.raises(AssertionError, match="keeps its row"):
        held([0, 1]).taken(np.array([1, 0, 2, 3]))


def test_later_rollouts_come_after_earlier_ones():
    both = joined_columns([held([2, 3]), held([2, 3])])
    assert both.taken(np.array([16, 13, 22, 3])).columns["seen"].tolist() == [[100, 30]]
