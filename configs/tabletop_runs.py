"""Small runs on the embedded tabletop datasets, which are written at first use: no download, no GPU."""

import dataclasses

from openpi_train.data.core import cache_folders
from openpi_train.data.formats.rlds import Rlds
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.envs import tabletop_env as world
from openpi_train.envs.closed_loop import ClosedLoop
from openpi_train.envs.tabletop_scene import Kind, Task
from openpi_train.experiment import EvalConfig, Experiment
from openpi_train.models.diffusion_policy import DiffusionPolicyConfig, UnetSizes
from openpi_train.models.pi0 import Pi0Config
from openpi_train.nn.gemma_sizes import GemmaOverrides
from openpi_train.nn.siglip import SiglipConfig
from openpi_train.objectives.diffusion import Diffusion
from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.optim import LRSchedule
from openpi_train.robots.tabletop import Tabletop
from openpi_train.sampling.noise_schedule import NoiseSchedule

_HOME = cache_folders.datasets() / "tabletop"
_EXPERT = GemmaOverrides(width=128, depth=4, mlp_dim=256)

pi0_bridge_traj_tiny = Experiment(
    model=Pi0Config(
        paligemma_variant="dummy",
        action_expert_variant="dummy",
        language=_EXPERT,
        action_expert=_EXPERT,
        siglip=SiglipConfig(width=128, depth=2, mlp_dim=256, num_heads=4, patch_size=16),
        image_size=64,
        action_dim=7,
        action_horizon=10,
        max_token_len=16,
        vocab_size=512,
        dtype="float32",
        remat="dots",
    ),
    objective=FlowMatching(num_flow_draws=4, augment=False),
    data=DataConfig(
        datasets=(Dataset(source=Rlds(path=str(_HOME)), robot=Tabletop(), asset_id="tabletop"),),
        tokenizer=str(_HOME / "tokenizer.model"),
    ),
    lr_schedule=LRSchedule(warmup_steps=20, peak_lr=3e-3, decay_steps=500, decay_lr=3e-4),
    ema_decay=0.98,
    batch_size=32,
    num_train_steps=500,
    num_workers=0,
    log_interval=25,
    save_interval=250,
    keep_period=None,
    eval=EvalConfig(interval=250, num_rows=256),
)
"""A small pi0 (about 1 M parameters, two cameras) on the embedded tabletop dataset; what `make train` runs.

Command: python -m openpi_train pi0_bridge_traj_tiny --exp-name x
Hardware: 2 CPU cores. Time: 2 min 51 s, with the dataset, without the environment. Result: held-out loss 0.445,
open-loop action error 0.708, against 0.875 for the mean action (`make train`, 2026-11-23, commit d1023d7).
"""

# Only the wrist camera, which shows the direction to move. A transformer without pretrained weights takes much longer
# to
# learn the position of the block on the table from the base camera.
_WRIST_ONLY = Tabletop(cameras={"left_wrist_0_rgb": "observation/image_1"})
_REACH_HOME = cache_folders.datasets() / "tabletop_reach"
_SMALL = GemmaOverrides(width=64, depth=2, mlp_dim=128, num_heads=4, head_dim=16)

pi0_tabletop_reach = dataclasses.replace(
    pi0_bridge_traj_tiny,
    model=dataclasses.replace(
        pi0_bridge_traj_tiny.model,
        language=_SMALL,
        action_expert=_SMALL,
        # A patch is as large as a block, so it mostly shows one object.
        siglip=SiglipConfig(width=64, depth=1, mlp_dim=128, num_heads=4, patch_size=8),
        action_horizon=4,
    ),
    data=DataConfig(
        datasets=(Dataset(source=Rlds(path=str(_REACH_HOME)), robot=_WRIST_ONLY, asset_id="tabletop_reach"),),
        tokenizer=str(_REACH_HOME / "tokenizer.model"),
        text_lengths=1,
    ),
    lr_schedule=LRSchedule(warmup_steps=50, peak_lr=2e-3, decay_steps=2000, decay_lr=1e-4),
    ema_decay=0.99,
    num_train_steps=2000,
    log_interval=50,
    save_interval=500,
    eval=EvalConfig(
        interval=500,
        closed_loop=ClosedLoop(
            env=world.TabletopEnv(task_list=(Task(Kind.REACH, "red"), Task(Kind.REACH, "blue"))),
            interval=500,
            episodes_per_task=50,
            execute=4,
        ),
    ),
)
"""A small pi0 (0.2 M parameters) whose prompt names the block to reach; what `make demo` runs.

Command: python -m openpi_train pi0_tabletop_reach --exp-name x
Hardware: 2 CPU cores. Result: 99 of 100 held-out episodes after 5 CPU minutes (docs/understand/benchmarks.md).
"""

_REACH_RED_HOME = cache_folders.datasets() / "tabletop_reach_red"

tabletop_dp = dataclasses.replace(
    pi0_tabletop_reach,
    model=DiffusionPolicyConfig(
        action_dim=7,
        action_horizon=8,
        n_obs_steps=1,
        n_action_steps=4,
        cameras=("base_0_rgb", "left_wrist_0_rgb"),
        image_height=64,
        image_width=64,
        pooling="spatial_softmax",
        num_keypoints=16,
        encoder_widths=(16, 32),
        unet=UnetSizes(widths=(64, 64), kernel_size=3),
        diffusion_step_embed_dim=64,
    ),
    # As in `metaworld_dp.py`.
    objective=Diffusion(noise_schedule=NoiseSchedule(prediction_type="sample"), sampler="ddim", num_draws=2),
    data=DataConfig(
        datasets=(Dataset(source=Rlds(path=str(_REACH_RED_HOME)), robot=Tabletop(), asset_id="tabletop_reach_red"),),
    ),
    lr_schedule=LRSchedule(warmup_steps=50, peak_lr=1e-3, decay_steps=2000, decay_lr=5e-5),
    num_train_steps=2000,
    save_interval=500,
    eval=EvalConfig(
        interval=500,
        closed_loop=ClosedLoop(
            env=world.TabletopEnv(task_list=(Task(Kind.REACH, "red"),)), interval=500, episodes_per_task=100, execute=4
        ),
    ),
)
"""A diffusion policy from images (ResNet with group norms, 1-D UNet) on one tabletop task, to move to the red block.

Command: python -m openpi_train tabletop_dp --exp-name x
Hardware: 2 CPU cores. Result: 100 of 100 held-out episodes from step 500 on; all 2,000 take 8 CPU minutes
(docs/understand/benchmarks.md).
"""
