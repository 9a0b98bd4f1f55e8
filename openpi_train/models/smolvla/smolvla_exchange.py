"""What SmolVLA exchanges with other projects: LeRobot's policies."""

from openpi_train.interop.exchange import Exchange
from openpi_train.models.smolvla.lerobot_smolvla import LEROBOT
from openpi_train.models.smolvla.smolvla import SmolVlaConfig

SMOLVLA = Exchange(family="smolvla", models=(SmolVlaConfig,), lerobot=LEROBOT)
