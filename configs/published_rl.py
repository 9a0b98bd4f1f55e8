"""Published models that learn from rewards: language models on GSM8K, and full pi0 from its own episodes.

docs/howto/reinforcement_learning.md describes such runs, docs/understand/planning.md what they need.
"""

import dataclasses

from openpi_train_configs import gsm8k_runs, pi0_bridge, tabletop_runs
from openpi_train_configs.published_models import MODELS

from openpi_train.envs.closed_loop import ClosedLoop
from openpi_train.envs.tabletop_env import TabletopEnv
from openpi_train.evaluation.eval_config import EvalConfig
from openpi_train.models.language.reference import ReferencedConfig
from openpi_train.objectives.policy_gradient import PolicyGradient
from openpi_train.optim import AdamW, LRSchedule
from openpi_train.rl.estimator import AdvantageEstimator
from openpi_train.rl.rewards.text_reward import TextReward
from openpi_train.rl.robot_rl import RobotRL
from openpi_train.rl.text_rl import TextRL
from openpi_train.sampling.flow_distribution import FlowDistribution

_SFT = (
    gsm8k_runs.gsm8k_sft_smollm2_135m,
    gsm8k_runs.gsm8k_sft_qwen25_05b,
    gsm8k_runs.gsm8k_sft_llama32_1b,
    gsm8k_runs.gsm8k_sft_gemma3_1b,
)

gsm8k_grpo_smollm2_135m, gsm8k_grpo_qwen25_05b, gsm8k_grpo_llama32_1b, gsm8k_grpo_gemma3_1b = (
    dataclasses.replace(
        sft,
        model=ReferencedConfig(policy=model),
        objective=PolicyGradient(average="rollouts", kl_weight=0.001),
        rl=TextRL(
            rewards=(TextReward(name="number_match"),),
            num_groups=64,
            group_size=8,
            max_new_tokens=512,
            completions_per_device=64,
        ),
        lr_schedule=LRSchedule(warmup_steps=10, peak_lr=1e-6, decay_steps=200, decay_lr=1e-6),
        batch_size=256,
        num_epochs=None,
        num_train_steps=200,
        save_interval=50,
        eval=dataclasses.replace(sft.eval, interval=50),
    )
    for sft, (model, _) in zip(_SFT, MODELS, strict=True)
)
"""GRPO on GSM8K's problems, rewarded for the right number; the reference is a frozen copy of the start weights.

Command: python -m openpi_train NAME --exp-name x --weight-loader.params-path <a run of gsm8k_sft>
Hardware: one GPU; docs/understand/planning.md has the plan of a model of 7 B parameters.
Time and result: not yet measured.
"""

_WORLD = TabletopEnv(image_size=224)

pi0_tabletop_rloo = dataclasses.replace(
    pi0_bridge.pi0_bridge_traj,
    data=tabletop_runs.pi0_bridge_traj_tiny.data,
    model=dataclasses.replace(pi0_bridge.pi0_bridge_traj.model, action_horizon=10),
    objective=PolicyGradient(distribution=FlowDistribution(num_steps=4, noise=1.0), average="rollouts"),
    rl=RobotRL(
        env=_WORLD,
        num_groups=64,
        group_size=8,
        advantages=AdvantageEstimator(kind="rloo"),
        execute=5,
        max_steps=80,
        episodes_per_device=64,
    ),
    lr_schedule=LRSchedule(warmup_steps=8, peak_lr=5e-6, decay_steps=400, decay_lr=5e-6),
    optimizer=AdamW(b2=0.95),
    ema_decay=None,
    batch_size=128,
    num_train_steps=400,
    save_interval=40,
    eval=EvalConfig(
        interval=40,
        num_rows=256,
        num_sample_steps=4,
        closed_loop=ClosedLoop(
            env=_WORLD, interval=40, episodes_per_task=32, execute=5, max_steps=80, episodes_per_device=64
        ),
    ),
)
"""Full pi0 (3.2 B parameters) learns from its own episodes on the embedded tabletop, in pictures of 224 pixels: what RL
of it needs. For another environment give --env.

Command: python -m openpi_train pi0_tabletop_rloo --exp-name x --weight-loader.params-path <a run of pi0>
Hardware: several GPUs; docs/understand/planning.md has the plan for eight. Time and result: not yet measured.
"""
