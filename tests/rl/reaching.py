"""A tiny pi0 that imitates noise, and whose environment is the tabletop: a run to go on from by RL.

On the command line it is `REACHING`, and its directory `runs/reaching/x`.
"""

import dataclasses
from pathlib import Path

from openpi_train_configs.debug import debug

from openpi_train.envs.closed_loop import ClosedLoop
from openpi_train.envs.tabletop_env import TabletopEnv
from openpi_train.envs.tabletop_scene import Kind, Task
from openpi_train.nn.gemma_sizes import GemmaOverrides
from openpi_train.nn.siglip import SiglipConfig
from openpi_train.objectives.flow_matching import FlowMatching

REACHING = f"{Path(__file__).resolve()}:reaching"
TABLETOP = TabletopEnv(image_size=16, task_list=(Task(Kind.REACH, "red"), Task(Kind.REACH, "blue")))
_SMALL = GemmaOverrides(width=16, depth=1, mlp_dim=16, num_heads=2, head_dim=8)

reaching = dataclasses.replace(
    debug,
    model=dataclasses.replace(
        debug.model,
        language=_SMALL,
        action_expert=_SMALL,
        siglip=SiglipConfig(width=16, depth=1, mlp_dim=16, num_heads=2, patch_size=16),
        image_size=16,
        action_dim=8,
        action_horizon=3,
        max_token_len=16,
        remat="none",
    ),
    objective=FlowMatching(augment=False),
    num_train_steps=2,
    save_interval=2,
    eval=dataclasses.replace(
        debug.eval, closed_loop=ClosedLoop(env=TABLETOP, episodes_per_task=1, execute=2, max_steps=2, num_videos=0)
    ),
)
"""A tiny pi0 on synthetic data, with the tabletop as its environment."""
