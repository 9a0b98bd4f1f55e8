"""Tasks by name and by number, and what is said of those that are not there."""

import pytest

from openpi_train.envs.env import NoEnv
from openpi_train.envs.tabletop_env import TabletopEnv
from openpi_train.envs.tabletop_scene import DEFAULT_TASKS
from openpi_train.envs.task_choice import chosen_tasks

ENV = TabletopEnv(task_list=DEFAULT_TASKS[:3])


def test_tasks_are_chosen_by_name_and_by_number_in_the_given_order():
    assert chosen_tasks(ENV, ("pick_yellow", "0")) == (2, 0)
    assert chosen_tasks(ENV, None) == (0, 1, 2) and chosen_tasks(NoEnv(), None) == ()


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (("reach_bleu",), r"no task reach_bleu; did you mean reach_blue\? TabletopEnv has 0 reach_red, 1 reach_blue"),
        (("3",), "no task 3; TabletopEnv has 0 reach_red"),
        (("1", "reach_blue"), "task reach_blue is given twice"),
        ((), "no task is given; TabletopEnv has"),
    ],
)
def test_a_choice_that_cannot_be_is_explained(wanted, message):
    with pytest.raises(ValueError, match=message):
        chosen_tasks(ENV, wanted)
