"""Configurations of schedules, optimizers and loss scaling.

Read next: `schedules.py`, `optimizer_config.py`, `loss_scale.py`.
"""

from openpi_train.optim.ema import EmaWarmup
from openpi_train.optim.loss_scale import LossScale, LossScaling
from openpi_train.optim.muon import Muon
from openpi_train.optim.optimizer_config import OptimizerConfig
from openpi_train.optim.optimizers import OPTIMIZERS, SGD, Adafactor, AdamW, Lion, named_optimizer
from openpi_train.optim.schedules import LRSchedule, learning_rate

__all__ = [
    "OPTIMIZERS",
    "SGD",
    "Adafactor",
    "AdamW",
    "EmaWarmup",
    "LRSchedule",
    "Lion",
    "LossScale",
    "LossScaling",
    "Muon",
    "OptimizerConfig",
    "learning_rate",
    "named_optimizer",
]
