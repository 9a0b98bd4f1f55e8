"""openpi's experiments on DROID, by their names and with their values (Physical-Intelligence/openpi at 15a9616).

`pi0_droid`, `pi0_fast_droid` and `pi05_droid` serve openpi's published checkpoints. Data: DROID's RLDS release where
tensorflow-datasets keeps it (--data.datasets.0.source.path), or a LeRobot dataset (--data.repo-id);
docs/from/openpi.md.
"""

import dataclasses

from openpi_train.checkpoints.weights import CheckpointWeightLoader
from openpi_train.data.core import cache_folders
from openpi_train.data.formats.lerobot import LeRobot
from openpi_train.data.formats.rlds import Rlds
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.experiment import Experiment
from openpi_train.models.pi0 import Pi0Config
from openpi_train.models.pi0_fast import Pi0FastConfig
from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.objectives.next_token import NextToken
from openpi_train.optim import LRSchedule
from openpi_train.robots.droid import Droid

_RELEASE = Rlds(path="~/tensorflow_datasets/droid/1.0.1", split="train")
_EXTERIOR, _WRIST = "observation/exterior_image_1_left", "observation/wrist_image_left"
# pi0-FAST has other slots, the empty one of which is a black picture.
_FAST_CAMERAS = {"base_0_rgb": _EXTERIOR, "wrist_0_rgb": _WRIST}
_VELOCITIES = Dataset(source=_RELEASE, robot=Droid(), asset_id="droid")
_POSITIONS = dataclasses.replace(_VELOCITIES, robot=Droid(action="joint_position"))
_FLAT = LRSchedule(warmup_steps=1_000, peak_lr=5e-5, decay_steps=1_000_000, decay_lr=5e-5)

pi0_droid = Experiment(
    model=Pi0Config(action_horizon=10), objective=FlowMatching(), data=DataConfig(datasets=(_VELOCITIES,))
)
"""pi0 on DROID's joint velocities, for serving: openpi's `pi0_droid`.

Command: python -m openpi_train pi0_droid --exp-name x
Hardware: as pi0_bridge_traj. Time and result: not yet measured.
"""

pi05_droid = dataclasses.replace(pi0_droid, model=Pi0Config(pi05=True, action_horizon=15))
"""pi0.5 on DROID's joint velocities, for serving: openpi's `pi05_droid`.

Command: python -m openpi_train pi05_droid --exp-name x
Hardware: as pi05_bridge. Time and result: not yet measured.
"""

pi0_fast_droid = Experiment(
    model=Pi0FastConfig(action_dim=8, action_horizon=10, black_cameras=True),
    objective=NextToken(),
    data=DataConfig(datasets=(dataclasses.replace(_VELOCITIES, robot=Droid(cameras=_FAST_CAMERAS)),)),
)
"""pi0-FAST on DROID's joint velocities, for serving: openpi's `pi0_fast_droid`.

Command: python -m openpi_train pi0_fast_droid --exp-name x
Hardware: as pi0_fast_bridge. Time and result: not yet measured.
"""

pi0_fast_full_droid_finetune = Experiment(
    model=Pi0FastConfig(action_dim=8, action_horizon=16, max_token_len=180, black_cameras=True),
    objective=NextToken(),
    data=DataConfig(
        datasets=(dataclasses.replace(_VELOCITIES, robot=Droid(cameras=_FAST_CAMERAS, action="joint_position")),)
    ),
    lr_schedule=_FLAT,
    weight_loader=CheckpointWeightLoader(params_path="gs://openpi-assets/checkpoints/pi0_fast_base/params"),
    batch_size=256,
    num_train_steps=100_000,
    save_interval=5_000,
    keep_period=20_000,
)
"""pi0-FAST on all of DROID, joint positions: openpi's `pi0_fast_full_droid_finetune`, with idle steps.

Command: python -m openpi_train pi0_fast_full_droid_finetune --exp-name x --fsdp-devices 8
Hardware: as pi0_fast_bridge. Time and result: not yet measured.
"""

pi05_full_droid_finetune = Experiment(
    model=Pi0Config(pi05=True, action_horizon=16),
    objective=FlowMatching(),
    data=DataConfig(
        datasets=(dataclasses.replace(_POSITIONS, norm_stats=cache_folders.openpi_assets("pi05_base", "droid")),)
    ),
    lr_schedule=_FLAT,
    weight_loader=CheckpointWeightLoader(params_path="gs://openpi-assets/checkpoints/pi05_base/params"),
    batch_size=256,
    num_train_steps=100_000,
    save_interval=5_000,
    keep_period=10_000,
)
"""pi0.5 on all of DROID, joint positions: openpi's `pi05_full_droid_finetune`, with idle steps.

Command: python -m openpi_train pi05_full_droid_finetune --exp-name x --fsdp-devices 8
Hardware: as pi05_bridge. Time and result: not yet measured.
"""

_OWN = Dataset(
    source=LeRobot(path=cache_folders.lerobot("YOU/YOUR_DATASET")),
    robot=Droid(
        cameras={"base_0_rgb": "exterior_image_1_left", "left_wrist_0_rgb": "wrist_image_left"},
        state_columns=("joint_position", "gripper_position"),
        action_columns=("actions",),
    ),
    asset_id="droid",
    norm_stats=cache_folders.openpi_assets("pi05_droid", "droid"),
)

pi05_droid_finetune = Experiment(
    model=Pi0Config(pi05=True, action_horizon=16),
    objective=FlowMatching(),
    data=DataConfig(datasets=(_OWN,)),
    weight_loader=CheckpointWeightLoader(params_path="gs://openpi-assets/checkpoints/pi05_droid/params"),
    num_train_steps=20_000,
)
"""pi0.5 on a DROID robot's own demonstrations, converted as in openpi's example: openpi's `pi05_droid_finetune`.

Command: python -m openpi_train pi05_droid_finetune --exp-name x --data.repo-id YOU/YOUR_DATASET
Hardware: as pi05_bridge. Time and result: not yet measured.
"""
