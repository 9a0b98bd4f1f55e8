"""openpi's experiments on LIBERO, by their names and with their values (Physical-Intelligence/openpi at 15a9616).

Data: `physical-intelligence/libero` where LeRobot downloads to, or --data.repo-id (docs/from/openpi.md). Start weights:
the published ones.
"""

import dataclasses

from openpi_train.checkpoints.weights import CheckpointWeightLoader
from openpi_train.data.core import cache_folders
from openpi_train.data.formats.lerobot import LeRobot
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.experiment import Experiment
from openpi_train.models.pi0 import Pi0Config
from openpi_train.models.pi0_fast import Pi0FastConfig
from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.objectives.next_token import NextToken
from openpi_train.optim import LRSchedule
from openpi_train.robots.libero import Libero

_NAME = "physical-intelligence/libero"
_SOURCE = LeRobot(path=cache_folders.lerobot(_NAME))
# openpi's older checkpoints saw the deltas less the pose.
_OLDER = DataConfig(datasets=(Dataset(source=_SOURCE, robot=Libero(extra_delta=True), asset_id=_NAME),))

pi0_libero = Experiment(
    model=Pi0Config(),
    objective=FlowMatching(),
    data=_OLDER,
    weight_loader=CheckpointWeightLoader(params_path="gs://openpi-assets/checkpoints/pi0_base/params"),
    num_train_steps=30_000,
)
"""pi0 on LIBERO, from openpi's base model: openpi's `pi0_libero`.

Command: python -m openpi_train pi0_libero --exp-name x
Hardware: as pi0_bridge_traj. Time and result: not yet measured.
"""

pi0_libero_low_mem_finetune = dataclasses.replace(
    pi0_libero,
    model=Pi0Config(paligemma_variant="gemma_2b_lora", action_expert_variant="gemma_300m_lora"),
    ema_decay=None,
)
"""pi0 on LIBERO with low-rank adapters: openpi's `pi0_libero_low_mem_finetune`.

Command: python -m openpi_train pi0_libero_low_mem_finetune --exp-name x
Hardware: as pi0_bridge_traj_lora. Time and result: not yet measured.
"""

pi05_libero = Experiment(
    model=Pi0Config(pi05=True, action_horizon=10, discrete_state_input=False),
    objective=FlowMatching(),
    data=DataConfig(datasets=(Dataset(source=_SOURCE, robot=Libero(), asset_id=_NAME),)),
    lr_schedule=LRSchedule(warmup_steps=10_000, peak_lr=5e-5, decay_steps=1_000_000, decay_lr=5e-5),
    weight_loader=CheckpointWeightLoader(params_path="gs://openpi-assets/checkpoints/pi05_base/params"),
    ema_decay=0.999,
    batch_size=256,
    num_train_steps=30_000,
)
"""pi0.5 on LIBERO, without the state in the prompt: openpi's `pi05_libero`.

Command: python -m openpi_train pi05_libero --exp-name x --fsdp-devices 8
Hardware: as pi05_bridge. Time and result: not yet measured.
"""

pi0_fast_libero = Experiment(
    model=Pi0FastConfig(
        action_dim=7,
        action_horizon=10,
        max_token_len=180,
        camera_slots=("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"),
        black_cameras=True,
    ),
    objective=NextToken(),
    data=_OLDER,
    weight_loader=CheckpointWeightLoader(params_path="gs://openpi-assets/checkpoints/pi0_fast_base/params"),
    num_train_steps=30_000,
)
"""pi0-FAST on LIBERO, from openpi's base model: openpi's `pi0_fast_libero`.

Command: python -m openpi_train pi0_fast_libero --exp-name x
Hardware: as pi0_fast_bridge. Time and result: not yet measured.
"""

pi0_fast_libero_low_mem_finetune = dataclasses.replace(
    pi0_fast_libero,
    model=dataclasses.replace(pi0_fast_libero.model, paligemma_variant="gemma_2b_lora"),
    ema_decay=None,
)
"""pi0-FAST on LIBERO with low-rank adapters: openpi's `pi0_fast_libero_low_mem_finetune`.

Command: python -m openpi_train pi0_fast_libero_low_mem_finetune --exp-name x
Hardware: as pi0_fast_bridge_lora. Time and result: not yet measured.
"""
