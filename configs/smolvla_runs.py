"""SmolVLA on BridgeData V2 with LeRobot's settings, and a small one on the embedded tabletop.

docs/understand/robot_policies.md compares fields and numbers.
"""

import dataclasses

from openpi_train_configs import tabletop_runs

from openpi_train.data.formats.rlds import Rlds
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.experiment import Experiment
from openpi_train.models.smolvla import SmolVlaConfig
from openpi_train.nn.siglip import SiglipConfig
from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.optim import AdamW, LRSchedule
from openpi_train.robots.bridge import Bridge

_BRIDGE = Rlds(path="~/tensorflow_datasets/bridge_dataset", split="train")

smolvla_bridge = Experiment(
    model=SmolVlaConfig(),
    objective=FlowMatching(mask_action_dims=True, augment=False),
    data=DataConfig(
        datasets=(Dataset(source=_BRIDGE, robot=Bridge(), asset_id="bridge"),),
        tokenizer="hub:HuggingFaceTB/SmolVLM2-500M-Video-Instruct",
    ),
    # LeRobot's preset.
    lr_schedule=LRSchedule(warmup_steps=1_000, peak_lr=1e-4, decay_steps=30_000, decay_lr=2.5e-6),
    optimizer=AdamW(clip_gradient_norm=10.0),
    ema_decay=None,
    batch_size=64,
    num_train_steps=20_000,
)
"""SmolVLA (450 M parameters, of which 100 M train: the action expert) on BridgeData V2's own pose deltas.

Command: python -m openpi_train smolvla_bridge --exp-name x --weight-loader.params-path hub:lerobot/smolvla_base
Hardware: one GPU. Time and result: not yet measured.
"""

tabletop_smolvla = dataclasses.replace(
    tabletop_runs.pi0_tabletop_reach,
    model=SmolVlaConfig(
        action_dim=7,
        action_horizon=4,
        max_token_len=16,
        vocab_size=512,
        image_size=64,
        siglip=SiglipConfig(width=64, depth=1, mlp_dim=128, num_heads=4, patch_size=8),
        pixel_shuffle=2,
        num_vlm_layers=2,
        width=64,
        mlp_dim=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        freeze_vision_encoder=False,
        train_expert_only=False,
        dtype="float32",
        remat="dots",
    ),
    objective=FlowMatching(mask_action_dims=True, augment=False, num_flow_draws=4),
)
"""A small SmolVLA (0.3 M parameters) whose prompt names the block to reach; all of it trains, without start weights.

Command: python -m openpi_train tabletop_smolvla --exp-name x
Hardware: 2 CPU cores. Result: 76 of 100 held-out episodes; 5 CPU minutes with the dataset (one seed;
2026-11-26, commit 5e3ede6; docs/understand/robot_policies.md).
"""
