"""How many actions of a chunk are executed: the first of these that says so."""

import dataclasses

import following
import pytest

from openpi_train.data.robot.windows import WindowShape
from openpi_train.envs.closed_loop import ClosedLoop
from openpi_train.evaluation.closed_loop_success import num_executed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published(following.Follow):
    replan_steps = 5


@pytest.mark.parametrize(
    ("env", "config", "window", "expected"),
    [
        (following.Follow(), {}, {"horizon": 50}, 25),
        (Published(), {}, {"horizon": 50}, 5),
        (Published(), {}, {"horizon": 4}, 4),
        (Published(), {}, {"horizon": 50, "execute": 8}, 8),
        (Published(), {"execute": 3}, {"horizon": 50, "execute": 8}, 3),
    ],
)
def test_flag_model_environment_and_half_of_the_chunk_in_this_order(env, config, window, expected):
    assert num_executed(ClosedLoop(env=env, **config), WindowShape(**window)) == expected
