r"""RECAP on the Fetch arm: a value function of stored episodes, and a policy that is told which steps were better.

    python -m openpi_train fetch_reach_ppo --exp-name kept --rl.keep data/fetch_own --rl.num-groups 256 --rl.epochs 1 \
        --num-train-steps 4 --save-interval 4 --weight-loader.params-path checkpoints/fetch_reach_few/x

keeps 256 episodes of a policy that imitates four demonstrations. docs/howto/reinforcement_learning.md describes it.
"""

import dataclasses

from openpi_train_configs import fetch_rl

from openpi_train.data.formats.lerobot import LeRobot
from openpi_train.evaluation.measure import Evaluations
from openpi_train.objectives.advantage_conditioned_flow import AdvantageConditionedFlow
from openpi_train.objectives.return_distribution import ReturnDistribution
from openpi_train.optim import AdamW, LRSchedule

_FEW = fetch_rl.fetch_reach_few
(_SHOWN,) = _FEW.data.datasets
_OWN = dataclasses.replace(_SHOWN, source=LeRobot(path="data/fetch_own"))

fetch_reach_value = dataclasses.replace(
    _FEW,
    model=dataclasses.replace(_FEW.model, return_bins=201),
    objective=ReturnDistribution(),
    # All episodes have 50 steps, which a state does not count: what they cost is noise, and only success tells.
    data=dataclasses.replace(_FEW.data, datasets=(_OWN,), label="return", failure_cost=10.0, validation_fraction=0.1),
    lr_schedule=LRSchedule(warmup_steps=20, peak_lr=1e-3, decay_steps=1000, decay_lr=1e-4),
    optimizer=AdamW(b2=0.95),
    ema_decay=None,
    num_train_steps=1000,
    save_interval=1000,
    keep_period=None,
    eval=Evaluations(interval=250),
)
"""A value function of stored episodes: how likely each of 201 returns is, from states.

Command: python -m openpi_train fetch_reach_value --exp-name x
Hardware: 2 CPU cores. Time: 58 CPU s. Result: a correlation of value and return of 0.95, 0.82 and 0.94 in held-out
episodes (seeds 45 to 47; 2026-12-01, commit 89c258be; benchmarks/results/practice_fetch.md).
"""

fetch_reach_recap = dataclasses.replace(
    _FEW,
    model=dataclasses.replace(_FEW.model, indicator=True),
    objective=AdvantageConditionedFlow(flow=_FEW.objective, drop=0.3, guidance=1.0),
    data=dataclasses.replace(
        _FEW.data,
        datasets=(
            dataclasses.replace(
                _OWN, advantages="data/advantages/fetch_own.parquet", norm_stats="assets/fetch_reach_few/fetch_reach"
            ),
        ),
        label="indicator",
    ),
    optimizer=dataclasses.replace(_FEW.optimizer, rate_mask="indicator", rate_factor=10.0),
    lr_schedule=LRSchedule(warmup_steps=20, peak_lr=1e-3, decay_steps=300, decay_lr=1e-3),
    save_interval=300,
    keep_period=None,
)
"""The policy goes on with its own stored episodes, each step of which is better than expected, or worse.

Command: python -m openpi_train fetch_reach_recap --exp-name x
    --weight-loader.params-path checkpoints/fetch_reach_few/x
Hardware: 2 CPU cores. Time: 100 CPU s, with two evaluations. Result: no gain: 37, 44 and 38 of 100 unseen episodes from
42, 43 and 39 (seeds 45 to 47; 2026-12-01, commit 89c258be; benchmarks/results/practice_fetch.md).
"""
