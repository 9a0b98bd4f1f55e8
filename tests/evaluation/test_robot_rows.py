"""What a policy in training is told of an environment."""

import dataclasses

import following
import jax
import numpy as np

from openpi_train.data.robot.windows import WindowShape
from openpi_train.evaluation.robot_rows import RobotRows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Silent(following.Follow):
    """Its first task has no instruction."""

    def instruction(self, task):
        return "" if task == 0 else "follow"


def test_a_task_without_an_instruction_gets_the_datasets_prompt():
    told = []

    def keep(row):
        told.append(row.pop("prompt"))
        return row | {"prompt_tokens": np.zeros(0, np.int32), "prompt_mask": np.zeros(0, bool)}

    plain = following.translation(WindowShape(horizon=4))
    translation = dataclasses.replace(plain, transforms=(keep, *plain.transforms[1:]), prompt="close the drawer")
    env = Silent()
    states = env.reset(jax.random.split(jax.random.key(0), 2), np.array([0, 1]))
    RobotRows(translation, env).columns(env.observe(states))
    assert told == ["close the drawer", "follow"]
