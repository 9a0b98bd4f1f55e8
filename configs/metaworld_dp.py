r"""Diffusion policies from state on Meta-World's scripted demonstrations: five tasks, selected by instruction.

    python -m openpi_train data collect metaworld --tasks reach button-press drawer-close window-open push \
        --out data/metaworld_mt5.zarr

An observation contains this control step and the previous one, so one observation is enough.
"""

import dataclasses

from openpi_train.data.formats.zarr import Zarr
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.envs.closed_loop import ClosedLoop
from openpi_train.envs.metaworld_env import MetaWorldEnv
from openpi_train.experiment import EvalConfig, Experiment
from openpi_train.models.diffusion_policy import DiffusionPolicyConfig
from openpi_train.objectives.diffusion import Diffusion
from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.optim import AdamW, EmaWarmup, LRSchedule
from openpi_train.robots.metaworld import MetaWorld
from openpi_train.sampling.noise_schedule import NoiseSchedule

_WORLD = MetaWorldEnv()

metaworld_mt5_dp = Experiment(
    model=DiffusionPolicyConfig(
        action_dim=4,
        state_dim=39,
        action_horizon=16,
        n_obs_steps=1,
        n_action_steps=16,
        cameras=(),
        instructions=tuple(_WORLD.instruction(task) for task in range(5)),
        denoiser="mlp",
        diffusion_step_embed_dim=64,
    ),
    # Predicting clean actions needs fewer training steps than predicting noise, whose errors the first denoising
    # steps magnify.
    objective=Diffusion(noise_schedule=NoiseSchedule(prediction_type="sample"), sampler="ddim", mask_padded_steps=True),
    data=DataConfig(
        datasets=(Dataset(source=Zarr(path="data/metaworld_mt5.zarr"), robot=MetaWorld()),),
        validation_fraction=0.05,
    ),
    lr_schedule=LRSchedule(warmup_steps=200, warmup_lr=0.0, peak_lr=1e-3, decay_steps=None, decay_lr=0.0),
    optimizer=AdamW(b1=0.95, b2=0.999, weight_decay=1e-6, clip_gradient_norm=1e9),
    ema_decay=0.9999,
    ema_warmup=EmaWarmup(power=0.75),
    batch_size=256,
    num_train_steps=4_000,
    num_workers=0,
    save_interval=4_000,
    keep_period=None,
    eval=EvalConfig(
        interval=1_000,
        num_sample_steps=10,
        closed_loop=ClosedLoop(env=_WORLD, interval=1_000, execute=8, episodes_per_device=50, num_videos=5),
    ),
)
"""A diffusion policy from state on five of Meta-World's tasks at once, 20 demonstrations each.

Command: python -m openpi_train metaworld_mt5_dp --exp-name x
Hardware: 2 CPU cores. Result: 49 of 50 held-out episodes after 4 CPU minutes (docs/understand/benchmarks.md).
"""

metaworld_mt5_flow = dataclasses.replace(
    metaworld_mt5_dp,
    objective=FlowMatching(augment=False, time_alpha=1.0),
)
"""The same network trained by flow matching.

Command: python -m openpi_train metaworld_mt5_flow --exp-name x
Hardware: 2 CPU cores. Result: 48 of 50 held-out episodes after 5 CPU minutes (docs/understand/benchmarks.md).
"""
