"""Small runs that learn from rewards of their own answers to the arithmetic task, from the weights of `arithmetic_sft`.

docs/howto/reinforcement_learning.md describes them.
"""

import dataclasses

from openpi_train_configs import arithmetic_runs

from openpi_train.data.core import cache_folders
from openpi_train.data.text.text_data import TextDataset
from openpi_train.models.language.actor_critic import ActorCriticConfig
from openpi_train.objectives.policy_gradient import PolicyGradient
from openpi_train.optim import LRSchedule
from openpi_train.rl.estimator import AdvantageEstimator
from openpi_train.rl.text_rl import TextRL

arithmetic_grpo = dataclasses.replace(
    arithmetic_runs.arithmetic_sft,
    objective=PolicyGradient(average="rollouts"),
    data=dataclasses.replace(
        arithmetic_runs.arithmetic_sft.data,
        datasets=(
            TextDataset(
                path=str(cache_folders.datasets() / "arithmetic" / "prompts"),
                validation="test",
                columns=("prompt=prompt", "completion=answer"),
            ),
        ),
    ),
    rl=TextRL(max_new_tokens=4, completions_per_device=256),
    lr_schedule=LRSchedule(warmup_steps=10, peak_lr=5e-4, decay_steps=120, decay_lr=5e-4),
    batch_size=256,
    num_train_steps=120,
    log_interval=10,
    save_interval=40,
    eval=dataclasses.replace(arithmetic_runs.arithmetic_sft.eval, interval=40),
)
"""GRPO: the model answers the arithmetic task's prompts eight times each, and learns from which answers are right.

Command: python -m openpi_train arithmetic_grpo --exp-name x --weight-loader.params-path checkpoints/arithmetic_sft/x
Hardware: 2 CPU cores. Time: 33 CPU s. Result: 89 % of 1,100 held-out problems, one sampled answer each, from weights
with 51 % (one seed; 2026-11-24, commit c9ebfe6).
"""

arithmetic_rloo = dataclasses.replace(
    arithmetic_grpo,
    objective=PolicyGradient(ratio="product", average="rollouts"),
    rl=dataclasses.replace(arithmetic_grpo.rl, advantages=AdvantageEstimator(kind="rloo")),
)
"""RLOO: the same with the mean of a group's other answers as the baseline, and one ratio for a whole answer.

Command: python -m openpi_train arithmetic_rloo --exp-name x --weight-loader.params-path checkpoints/arithmetic_sft/x
Hardware: 2 CPU cores. Time: 32 CPU s. Result: 89 % of 1,100 held-out problems, one sampled answer each, from weights
with 51 % (one seed; 2026-11-24, commit c9ebfe6).
"""

arithmetic_ppo = dataclasses.replace(
    arithmetic_grpo,
    model=ActorCriticConfig(policy=arithmetic_runs.arithmetic_sft.model),
    objective=PolicyGradient(value_weight=0.5),
    rl=dataclasses.replace(
        arithmetic_grpo.rl, num_groups=256, group_size=1, epochs=2, advantages=AdvantageEstimator(kind="gae")
    ),
    optimizer=dataclasses.replace(arithmetic_grpo.optimizer, rate_mask="critic/", rate_factor=2.0),
    lr_schedule=LRSchedule(warmup_steps=20, peak_lr=5e-4, decay_steps=200, decay_lr=5e-4),
    num_train_steps=200,
    log_interval=20,
    eval=dataclasses.replace(arithmetic_grpo.eval, interval=100),
)
"""PPO: one answer to each prompt, compared with what a critic of its own expects; two passes over every collection.

Command: python -m openpi_train arithmetic_ppo --exp-name x --weight-loader.params-path checkpoints/arithmetic_sft/x
Hardware: 2 CPU cores. Time: 81 CPU s. Result: 91 % of 1,100 held-out problems, one sampled answer each, from weights
with 51 % (one seed; 2026-11-24, commit c9ebfe6).
"""
