r"""PPO with a critic in a world that acts in worker processes: the Fetch arm of gymnasium-robotics; the extra `fetch`.

    python -m openpi_train data collect fetch:reach --out data/fetch_reach.zarr --episodes-per-task 4
    python -m openpi_train data convert data/fetch_reach.zarr data/fetch_reach --to lerobot --control-hz 25

docs/howto/reinforcement_learning.md describes it.
"""

import dataclasses

from openpi_train_configs import metaworld_dp

from openpi_train.data.formats.lerobot import LeRobot
from openpi_train.data.robot.config import Dataset
from openpi_train.envs.closed_loop import ClosedLoop
from openpi_train.envs.gym_env import GymEnv
from openpi_train.envs.in_processes import ProcessEnv
from openpi_train.objectives.policy_gradient import PolicyGradient
from openpi_train.optim import AdamW, EmaWarmup, LRSchedule
from openpi_train.rl.estimator import AdvantageEstimator
from openpi_train.rl.robot_rl import RobotRL
from openpi_train.robots.numbered import Numbered
from openpi_train.sampling.flow_distribution import FlowDistribution

# As --env fetch:reach, which asks for the package already when it is named.
_WORLD = ProcessEnv(
    env=GymEnv(
        source="gymnasium_robotics:FetchReach-v4",
        prompt="move the gripper to the goal",
        success_at="last",
        step_limit=50,
    )
)
_FLOW = metaworld_dp.metaworld_mt5_flow

fetch_reach_few = dataclasses.replace(
    _FLOW,
    model=dataclasses.replace(_FLOW.model, state_dim=16, action_horizon=8, n_action_steps=8, instructions=()),
    data=dataclasses.replace(
        _FLOW.data,
        datasets=(
            Dataset(
                source=LeRobot(path="data/fetch_reach"),
                robot=Numbered(num_state_dims=16, num_action_dims=4, rate_hz=25.0, cameras={}),
            ),
        ),
        validation_fraction=0.0,
    ),
    lr_schedule=LRSchedule(warmup_steps=50, peak_lr=1e-3, decay_steps=450, decay_lr=1e-3),
    ema_decay=0.99,
    ema_warmup=EmaWarmup(),
    batch_size=128,
    num_train_steps=450,
    save_interval=450,
    eval=dataclasses.replace(
        _FLOW.eval,
        interval=450,
        num_sample_steps=4,
        closed_loop=ClosedLoop(
            env=_WORLD,
            interval=450,
            episodes_per_task=100,
            execute=4,
            max_steps=50,
            episodes_per_device=50,
            num_videos=0,
        ),
    ),
)
"""A small flow policy (0.9 M parameters) imitates four demonstrations of reaching a goal, from states.

Command: python -m openpi_train fetch_reach_few --exp-name x
Hardware: 2 CPU cores. Time: 48 and 51 CPU s, without evaluations. Result: 28 and 38 of 100 unseen episodes, and 40 in
place of 38 after 2,000 steps (seeds 42 and 43; 2026-12-01, commit 9b7c57f0; benchmarks/results/practice_fetch.md).
"""

fetch_reach_ppo = dataclasses.replace(
    fetch_reach_few,
    model=dataclasses.replace(fetch_reach_few.model, critic=True),
    objective=PolicyGradient(
        distribution=FlowDistribution(num_steps=4, noise=0.5), average="rollouts", value_weight=0.5, value_clip=None
    ),
    rl=RobotRL(
        env=_WORLD,
        num_groups=128,
        group_size=1,
        epochs=4,
        advantages=AdvantageEstimator(kind="gae", gamma=0.99, lam=0.9),
        # It succeeds by being at the goal in the last control step.
        bootstrap=False,
        execute=4,
        # Time to reach any goal: what comes later costs simulation, and says little.
        max_steps=24,
        episodes_per_device=64,
    ),
    lr_schedule=LRSchedule(warmup_steps=16, peak_lr=1.5e-4, decay_steps=160, decay_lr=1.5e-4),
    # The critic is new, and the policy is not.
    optimizer=AdamW(b2=0.95, rate_mask="value_head/", rate_factor=20.0),
    ema_decay=None,
    batch_size=64,
    num_train_steps=160,
    log_interval=8,
    save_interval=160,
    keep_period=None,
    eval=dataclasses.replace(
        fetch_reach_few.eval,
        interval=160,
        closed_loop=dataclasses.replace(fetch_reach_few.eval.closed_loop, interval=160),
    ),
)
"""It goes on by PPO, with a critic.

Command: python -m openpi_train fetch_reach_ppo --exp-name x --weight-loader.params-path checkpoints/fetch_reach_few/x
Hardware: 2 CPU cores. Time: 325 CPU s, with two evaluations. Result: 56, 64 and 43 of 100 unseen episodes from 42, 43
and 39, where 3,000 more steps of imitation end at 38, 48 and 41 (seeds 45 to 47; 2026-12-01, commit 89c258be;
benchmarks/results/practice_fetch.md).
"""
