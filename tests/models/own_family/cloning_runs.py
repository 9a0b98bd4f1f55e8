"""Experiments of a family of one's own, and the line that registers it."""

from cloning import CloningConfig
from cloning_error import CloningError
from cloning_exchange import CLONING

from openpi_train import families
from openpi_train.data.make.fake import FakeData
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.experiment import EvalConfig, Experiment
from openpi_train.optim import LRSchedule
from openpi_train.robots.bridge import Bridge

families.register(CLONING)

_WALKS = FakeData(num_episodes=8, image_height=8, image_width=8)

clone = Experiment(
    model=CloningConfig(action_dim=7),
    objective=CloningError(),
    data=DataConfig(
        datasets=(Dataset(source=_WALKS, robot=Bridge(cameras={}), asset_id="fake"),),
        validation_fraction=0.3,
    ),
    batch_size=8,
    num_train_steps=8,
    save_interval=4,
    log_interval=1,
    num_workers=0,
    ema_decay=None,
    lr_schedule=LRSchedule(warmup_steps=1, peak_lr=0.02, decay_steps=8, decay_lr=0.01),
    eval=EvalConfig(interval=4, num_rows=16),
)
"""Behaviour cloning of random walks."""
