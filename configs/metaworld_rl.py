"""A run that learns from its own episodes in Meta-World, whose simulators act in worker processes; the extra `sim`.

    python -m openpi_train data collect metaworld --tasks reach --out data/metaworld_reach.zarr

docs/howto/reinforcement_learning.md describes it.
"""

import dataclasses

from openpi_train_configs import metaworld_dp

from openpi_train.data.formats.zarr import Zarr
from openpi_train.data.robot.config import Dataset
from openpi_train.envs.closed_loop import ClosedLoop
from openpi_train.envs.in_processes import ProcessEnv
from openpi_train.envs.metaworld_env import MetaWorldEnv
from openpi_train.objectives.policy_gradient import PolicyGradient
from openpi_train.optim import AdamW, EmaWarmup, LRSchedule
from openpi_train.rl.estimator import AdvantageEstimator
from openpi_train.rl.robot_rl import RobotRL
from openpi_train.robots.metaworld import MetaWorld
from openpi_train.sampling.flow_distribution import FlowDistribution

_WORLD = ProcessEnv(env=MetaWorldEnv(task_list=("reach",)))

metaworld_reach = dataclasses.replace(
    metaworld_dp.metaworld_mt5_flow,
    model=dataclasses.replace(metaworld_dp.metaworld_mt5_flow.model, instructions=(_WORLD.instruction(0),)),
    data=dataclasses.replace(
        metaworld_dp.metaworld_mt5_flow.data,
        datasets=(Dataset(source=Zarr(path="data/metaworld_reach.zarr"), robot=MetaWorld()),),
    ),
    lr_schedule=LRSchedule(warmup_steps=50, peak_lr=1e-3, decay_steps=450, decay_lr=1e-3),
    ema_decay=0.99,
    ema_warmup=EmaWarmup(),
    num_train_steps=450,
    save_interval=450,
    eval=dataclasses.replace(
        metaworld_dp.metaworld_mt5_flow.eval,
        interval=150,
        num_sample_steps=4,
        closed_loop=ClosedLoop(
            env=_WORLD,
            interval=450,
            episodes_per_task=100,
            execute=8,
            max_steps=150,
            episodes_per_device=50,
            num_videos=0,
        ),
    ),
)
"""A small flow policy (0.9 M parameters) imitates a few demonstrations of reaching a goal, from states.

Command: python -m openpi_train metaworld_reach --exp-name x
Before it: python -m openpi_train data collect metaworld --tasks reach --out data/metaworld_reach.zarr
Hardware: 2 CPU cores. Time: 53 CPU s. Result: 46 of 100 unseen episodes (one seed; 2026-11-24, commit bb6cf4d).
"""

metaworld_rloo = dataclasses.replace(
    metaworld_reach,
    objective=PolicyGradient(distribution=FlowDistribution(num_steps=4, noise=1.0), average="rollouts"),
    rl=RobotRL(
        env=_WORLD,
        num_groups=16,
        group_size=8,
        advantages=AdvantageEstimator(kind="rloo"),
        execute=8,
        max_steps=150,
        episodes_per_device=128,
    ),
    # Adam's first steps are its largest: without a warm-up a quarter of the units is clipped.
    lr_schedule=LRSchedule(warmup_steps=8, peak_lr=5e-5, decay_steps=20, decay_lr=5e-5),
    optimizer=AdamW(b2=0.95),
    ema_decay=None,
    batch_size=32,
    num_train_steps=20,
    log_interval=4,
    save_interval=20,
    eval=dataclasses.replace(
        metaworld_reach.eval,
        interval=20,
        closed_loop=dataclasses.replace(metaworld_reach.eval.closed_loop, interval=20),
    ),
)
"""It goes on by policy gradients.

Command: python -m openpi_train metaworld_rloo --exp-name x --weight-loader.params-path checkpoints/metaworld_reach/x
Hardware: 2 CPU cores. Time: 89 to 98 CPU s. Result: 100 of 100 unseen episodes, from 42, 40 and 48 (seeds 42 to 44,
half trained; 2026-11-26, commit 574e7dc; docs/understand/benchmarks.md).
"""
