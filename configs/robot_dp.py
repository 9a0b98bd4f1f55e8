"""Diffusion policies on zarr replay buffers: RoboTwin's two arms (`robot_dp`), Push-T (`pusht_dp`), and tiny ones.

Give the store with --dataset PATH. Sizes and settings are RoboTwin's (`policy/DP`, branch stable_2.0) and
diffusion_policy's; docs/from/diffusion_policy.md lists the differences.
"""

import dataclasses

from openpi_train.choice import ByActionDim
from openpi_train.data.formats.zarr import Zarr
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.experiment import EvalConfig, Experiment
from openpi_train.models.diffusion_policy import DiffusionPolicyConfig, UnetSizes
from openpi_train.nn.augment import RandomCrop
from openpi_train.objectives.diffusion import Diffusion
from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.optim import AdamW, EmaWarmup, LRSchedule
from openpi_train.robots.pusht import PushT
from openpi_train.robots.robotwin import RoboTwin

_SIX_TASKS = Zarr(path="data/six_tasks.zarr")

robot_dp_14 = Experiment(
    model=DiffusionPolicyConfig(action_dim=14),
    objective=Diffusion(),
    data=DataConfig(
        datasets=(Dataset(source=_SIX_TASKS, robot=RoboTwin(dims=14)),),
        validation_fraction=0.02,
    ),
    lr_schedule=LRSchedule(warmup_steps=500, warmup_lr=0.0, peak_lr=1e-4, decay_steps=None, decay_lr=0.0),
    optimizer=AdamW(b1=0.95, b2=0.999, weight_decay=1e-6, clip_gradient_norm=1e9),
    ema_decay=0.9999,
    ema_warmup=EmaWarmup(power=0.75),
    batch_size=128,
    num_epochs=600,
    logs_json=True,
    eval=EvalConfig(interval=1_000, num_rows=128, num_train_rows=128, num_sample_steps=100),
)
"""RoboTwin's diffusion policy on both arms of 6 joints and a gripper: one camera, 97 M parameters, chunks of 8 actions.

Command: python -m openpi_train robot_dp_14 --exp-name x --dataset data/six_tasks.zarr
Hardware: one GPU; several with `launch local --processes N`. Time and result: not yet measured.
"""

robot_dp_10 = dataclasses.replace(
    robot_dp_14,
    model=DiffusionPolicyConfig(action_dim=10),
    data=dataclasses.replace(robot_dp_14.data, datasets=(Dataset(source=_SIX_TASKS, robot=RoboTwin(dims=10)),)),
)
"""The same for an end pose of 10 dims.

Command: python -m openpi_train robot_dp_10 --exp-name x --dataset data/six_tasks.zarr
Hardware: as robot_dp_14. Time and result: not yet measured.
"""

robot_dp_16 = dataclasses.replace(
    robot_dp_14,
    model=DiffusionPolicyConfig(action_dim=16),
    data=dataclasses.replace(robot_dp_14.data, datasets=(Dataset(source=_SIX_TASKS, robot=RoboTwin(dims=16)),)),
)
"""The same for both arms of 7 joints and a gripper.

Command: python -m openpi_train robot_dp_16 --exp-name x --dataset data/six_tasks.zarr
Hardware: as robot_dp_14. Time and result: not yet measured.
"""

robot_dp = ByActionDim(experiments={10: robot_dp_10, 14: robot_dp_14, 16: robot_dp_16})
"""robot_dp_10, robot_dp_14 or robot_dp_16, by the action dims of the dataset.

Command: python -m openpi_train robot_dp --exp-name x --dataset data/six_tasks.zarr
Hardware: as robot_dp_14. Time and result: not yet measured.
"""

_TINY = DiffusionPolicyConfig(
    action_dim=14,
    image_height=24,
    image_width=32,
    encoder_widths=(16, 32),
    unet=UnetSizes(widths=(32, 64)),
    diffusion_step_embed_dim=32,
)
robot_dp_tiny_14 = dataclasses.replace(
    robot_dp_14,
    model=_TINY,
    lr_schedule=LRSchedule(warmup_steps=10, peak_lr=1e-3, decay_steps=None, decay_lr=0.0),
    data=dataclasses.replace(robot_dp_14.data, validation_fraction=0.1),
    batch_size=16,
    num_epochs=None,
    num_train_steps=200,
    num_workers=0,
    log_interval=10,
    save_interval=100,
    keep_period=None,
    eval=EvalConfig(interval=0, num_rows=32, num_train_rows=32, num_sample_steps=10),
)
robot_dp_tiny_10 = dataclasses.replace(
    robot_dp_tiny_14,
    model=dataclasses.replace(_TINY, action_dim=10),
    data=dataclasses.replace(robot_dp_tiny_14.data, datasets=robot_dp_10.data.datasets),
)
robot_dp_tiny_16 = dataclasses.replace(
    robot_dp_tiny_14,
    model=dataclasses.replace(_TINY, action_dim=16),
    data=dataclasses.replace(robot_dp_tiny_14.data, datasets=robot_dp_16.data.datasets),
)
robot_dp_tiny = ByActionDim(experiments={10: robot_dp_tiny_10, 14: robot_dp_tiny_14, 16: robot_dp_tiny_16})
"""robot_dp for a laptop: images of 24 x 32 pixels, 0.2 M parameters, 200 steps.

Command: python -m openpi_train robot_dp_tiny --exp-name x --dataset data/six_tasks.zarr
Hardware: 2 CPU cores. Time and result: not yet measured.
"""

pusht_dp = dataclasses.replace(
    robot_dp_14,
    model=DiffusionPolicyConfig(
        action_dim=2,
        action_horizon=16,
        n_obs_steps=2,
        n_action_steps=8,
        cameras=("image",),
        image_height=96,
        image_width=96,
        unet=UnetSizes(widths=(512, 1024, 2048)),
    ),
    objective=Diffusion(augmentation=RandomCrop(height=84, width=84)),
    data=dataclasses.replace(
        robot_dp_14.data,
        datasets=(Dataset(source=Zarr(path="data/pusht/pusht_cchi_v7_replay.zarr"), robot=PushT()),),
    ),
    batch_size=64,
    num_epochs=3050,
)
"""diffusion_policy's Push-T from images: one camera in random crops, 289 M parameters, chunks of 16 actions.

Command: python -m openpi_train pusht_dp --exp-name x --dataset data/pusht/pusht_cchi_v7_replay.zarr
Hardware: one GPU. Time and result: not yet measured.
"""

pusht_flow = dataclasses.replace(
    pusht_dp,
    objective=FlowMatching(augmentation=RandomCrop(height=84, width=84), mask_padded_steps=False, time_alpha=1.0),
    eval=dataclasses.replace(pusht_dp.eval, num_sample_steps=10),
)
"""The same network trained by flow matching, and sampled in 10 steps.

Command: python -m openpi_train pusht_flow --exp-name x --dataset data/pusht/pusht_cchi_v7_replay.zarr
Hardware: one GPU. Time and result: not yet measured.
"""
