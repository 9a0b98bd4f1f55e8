"""A tiny pi0 that imitates noise, and whose environment is the tabletop: a run to practise from.

On the command line it is `REACHING`, and its directory `runs/reaching/x`.
"""

import dataclasses
from pathlib import Path

from practice.wandering import SIZE, wandering

from openpi_train.envs.closed_loop import ClosedLoop
from openpi_train.envs.tabletop_env import TabletopEnv
from openpi_train.envs.tabletop_scene import Kind, Task
from openpi_train.objectives.flow_matching import FlowMatching

REACHING = f"{Path(__file__).resolve()}:reaching"
TABLETOP = TabletopEnv(image_size=SIZE, task_list=(Task(Kind.REACH, "red"), Task(Kind.REACH, "blue")))

reaching = dataclasses.replace(
    wandering,
    objective=FlowMatching(augment=False),
    practice=None,
    num_train_steps=2,
    save_interval=2,
    eval=dataclasses.replace(
        wandering.eval, closed_loop=ClosedLoop(env=TABLETOP, episodes_per_task=1, execute=2, max_steps=2, num_videos=0)
    ),
)
"""A tiny pi0 on synthetic data, with the tabletop as its environment."""
