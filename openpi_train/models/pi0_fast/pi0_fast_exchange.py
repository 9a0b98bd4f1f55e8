"""What pi0-FAST exchanges with other projects: openpi's checkpoints, and LeRobot's policies."""

from openpi_train.interop.exchange import Exchange
from openpi_train.models.pi0_fast.lerobot_pi0_fast import LEROBOT
from openpi_train.models.pi0_fast.pi0_fast import Pi0FastConfig

PI0_FAST = Exchange(family="pi0_fast", models=(Pi0FastConfig,), lerobot=LEROBOT, in_openpi=True)
