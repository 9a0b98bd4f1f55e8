"""What pi0 and pi0.5 exchange with other projects: openpi's checkpoints, and LeRobot's policies."""

from openpi_train.interop.exchange import Exchange
from openpi_train.models.pi0.lerobot_pi0 import LEROBOT
from openpi_train.models.pi0.pi0 import Pi0Config

PI0 = Exchange(family="pi0", models=(Pi0Config,), lerobot=LEROBOT, in_openpi=True)
