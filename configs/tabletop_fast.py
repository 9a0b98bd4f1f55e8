"""A small pi0-FAST on demonstrations of the embedded tabletop, and from its own episodes.

    python -m openpi_train data fit-fast tabletop_fast --vocab-size 257 --scale 3  # first: the tokenizer of chunks

Nearly every token is then one coefficient of the chunk: of so few dims and steps that is learnt sooner than pairs.

docs/howto/reinforcement_learning.md describes such runs.
"""

import dataclasses

from openpi_train_configs import fast, tabletop_rl, tabletop_runs

from openpi_train.data.core import cache_folders
from openpi_train.objectives.policy_gradient import PolicyGradient
from openpi_train.optim import LRSchedule
from openpi_train.sampling.action_token_distribution import ActionTokenDistribution

_FEW, _RLOO = tabletop_rl.tabletop_few, tabletop_rl.tabletop_few_rloo

tabletop_fast = dataclasses.replace(
    _FEW,
    model=dataclasses.replace(
        fast.pi0_fast_tiny.model,
        language=_FEW.model.language,
        siglip=_FEW.model.siglip,
        action_horizon=_FEW.model.action_horizon,
        camera_slots=("left_wrist_0_rgb",),
        # The longest chunk of the demonstrations takes 29 tokens, "Action: " and the end included.
        max_decoding_steps=32,
        fast_tokenizer=str(cache_folders.datasets() / "tabletop_reach_fast"),
    ),
    objective=fast.pi0_fast_tiny.objective,
    data=tabletop_runs.pi0_tabletop_reach.data,
    lr_schedule=LRSchedule(warmup_steps=50, peak_lr=3e-3, decay_steps=3000, decay_lr=3e-4),
    num_train_steps=1600,
)
"""It imitates all demonstrations of `pi0_tabletop_reach` in tokens, until it succeeds in a quarter of the episodes.

Command: python -m openpi_train tabletop_fast --exp-name x
Hardware: 2 CPU cores. Time: 444 to 515 CPU s. Result: 33, 16.3 and 26.3 % of 400 unseen episodes (seeds 42 to 44;
2026-11-26, commit 0916898).
"""

tabletop_fast_rloo = dataclasses.replace(
    _RLOO,
    model=tabletop_fast.model,
    # At temperature 1 the tokens' own noise costs a third of the success, and RL first learns to be certain.
    objective=PolicyGradient(distribution=ActionTokenDistribution(temperature=0.7, max_tokens=32), average="rollouts"),
    data=tabletop_fast.data,
    rl=dataclasses.replace(_RLOO.rl, mixed_only=True),
    lr_schedule=LRSchedule(warmup_steps=8, peak_lr=5e-4, decay_steps=120, decay_lr=5e-4),
    num_train_steps=120,
)
"""It goes on by policy gradients over the tokens of its chunks.

Command: python -m openpi_train tabletop_fast_rloo --exp-name x --weight-loader.params-path checkpoints/tabletop_fast/x
Hardware: 2 CPU cores. Time: 1,463 to 1,542 CPU s. Result: 45, 48.8 and 46.8 % from 33, 16.3 and 26.3 % (seeds 42 to 44;
2026-11-26, commit 0916898; docs/understand/benchmarks.md).
"""
