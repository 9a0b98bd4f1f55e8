"""Small runs that learn from their own episodes on the embedded tabletop, from the weights of `tabletop_few`.

docs/howto/reinforcement_learning.md describes them.
"""

import dataclasses

from openpi_train_configs import tabletop_runs

from openpi_train.data.core import cache_folders
from openpi_train.data.formats.rlds import Rlds
from openpi_train.data.robot.config import Dataset
from openpi_train.objectives.policy_gradient import PolicyGradient
from openpi_train.optim import AdamW, LRSchedule
from openpi_train.rl.estimator import AdvantageEstimator
from openpi_train.rl.robot_rl import RobotRL
from openpi_train.sampling.denoising_distribution import DenoisingDistribution
from openpi_train.sampling.flow_distribution import FlowDistribution

_FEW_HOME = cache_folders.datasets() / "tabletop_reach_few"
_REACH = tabletop_runs.pi0_tabletop_reach
_EVAL = dataclasses.replace(
    _REACH.eval,
    num_sample_steps=4,
    closed_loop=dataclasses.replace(
        _REACH.eval.closed_loop, episodes_per_task=100, max_steps=40, episodes_per_device=128
    ),
)

tabletop_few = dataclasses.replace(
    _REACH,
    data=dataclasses.replace(
        _REACH.data,
        datasets=(
            Dataset(
                source=Rlds(path=str(_FEW_HOME)),
                robot=_REACH.data.datasets[0].robot,
                asset_id="tabletop_reach_few",
            ),
        ),
        tokenizer=str(_FEW_HOME / "tokenizer.model"),
    ),
    lr_schedule=LRSchedule(warmup_steps=50, peak_lr=1e-3, decay_steps=1200, decay_lr=1e-3),
    num_train_steps=1200,
    save_interval=300,
    eval=dataclasses.replace(_EVAL, interval=300, closed_loop=dataclasses.replace(_EVAL.closed_loop, interval=300)),
)
"""A small pi0 (0.2 M parameters) imitates 64 demonstrations of each of two tasks: to reach the red, or the blue block.

Command: python -m openpi_train tabletop_few --exp-name x
Hardware: 2 CPU cores. Time: 186 CPU s. Result: 56, 38.5 and 35.5 % of 200 unseen episodes (seeds 42 to 44; 2026-11-24,
commit 93ad7ac).
"""

tabletop_few_rloo = dataclasses.replace(
    tabletop_few,
    objective=PolicyGradient(distribution=FlowDistribution(num_steps=4, noise=1.0), average="rollouts"),
    rl=RobotRL(
        env=_EVAL.closed_loop.env,
        num_groups=32,
        group_size=8,
        advantages=AdvantageEstimator(kind="rloo"),
        execute=4,
        max_steps=40,
        episodes_per_device=128,
    ),
    # Without a warm-up Adam's first step is up to 0.26 nats from the acting policy, and later ones 0.005.
    lr_schedule=LRSchedule(warmup_steps=8, peak_lr=3e-4, decay_steps=280, decay_lr=3e-4),
    optimizer=AdamW(b2=0.95),
    ema_decay=None,
    batch_size=64,
    num_train_steps=280,
    log_interval=4,
    save_interval=20,
    eval=dataclasses.replace(_EVAL, interval=40, closed_loop=dataclasses.replace(_EVAL.closed_loop, interval=40)),
)
"""It goes on by policy gradients, with the mean of a group's other episodes as the baseline.

Command: python -m openpi_train tabletop_few_rloo --exp-name x --weight-loader.params-path checkpoints/tabletop_few/x
Hardware: 2 CPU cores. Time: 639 to 665 CPU s. Result: 76, 57 and 64.8 % from 58.8, 46.5 and 50.5 %, after 4,200 steps
of `tabletop_few`, where as much more imitation gains nothing (seeds 42 to 44; 2026-11-26, commit 305bd66;
docs/understand/benchmarks.md).
"""

tabletop_dp_rloo = dataclasses.replace(
    tabletop_few_rloo,
    model=tabletop_runs.tabletop_dp.model,
    objective=PolicyGradient(
        distribution=DenoisingDistribution(
            num_steps=10, noise_schedule=tabletop_runs.tabletop_dp.objective.noise_schedule
        ),
        average="rollouts",
    ),
    data=tabletop_runs.tabletop_dp.data,
    # Learning takes longer than acting, and a quarter of the groups is mixed.
    rl=dataclasses.replace(
        tabletop_few_rloo.rl,
        env=tabletop_runs.tabletop_dp.eval.closed_loop.env,
        num_groups=16,
        mixed_only=True,
    ),
    # The last denoising steps have the least standard deviation, so what moves the actions by a tenth changes their
    # log-probability by tens. Adam's first step at 1.5e-4, without a warm-up, does that, and success falls.
    lr_schedule=LRSchedule(warmup_steps=8, peak_lr=4e-5, decay_steps=40, decay_lr=4e-5),
    batch_size=32,
    num_train_steps=40,
    eval=dataclasses.replace(
        tabletop_few_rloo.eval,
        interval=20,
        num_sample_steps=10,
        closed_loop=dataclasses.replace(
            tabletop_few_rloo.eval.closed_loop,
            env=tabletop_runs.tabletop_dp.eval.closed_loop.env,
            interval=20,
            episodes_per_task=200,
        ),
    ),
)
"""The same with the diffusion policy of `tabletop_dp`, half trained.

Command: python -m openpi_train tabletop_dp_rloo --exp-name x --weight-loader.params-path checkpoints/tabletop_dp/x
Hardware: 2 CPU cores. Time: 251 to 293 CPU s. Result: 81, 50.5 and 83.5 % from 66, 35 and 57 %, after 150 steps of
`tabletop_dp` (seeds 42 to 44; 2026-11-26, commit 574e7dc; docs/understand/benchmarks.md).
"""
