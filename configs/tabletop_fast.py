"""A small pi0-FAST on few demonstrations of the embedded tabletop, and from its own episodes.

    python -m openpi_train data fit-fast tabletop_fast --vocab-size 384        # first: the tokenizer of its chunks

docs/practice.md describes such runs.
"""

import dataclasses

from openpi_train_configs import fast, tabletop_practice

from openpi_train.data import places
from openpi_train.objectives.policy_gradient import PolicyGradient
from openpi_train.sampling.action_token_law import ActionTokenLaw

_FEW, _RLOO = tabletop_practice.tabletop_few, tabletop_practice.tabletop_few_rloo

tabletop_fast = dataclasses.replace(
    _FEW,
    model=dataclasses.replace(
        fast.pi0_fast_tiny.model,
        language=_FEW.model.language,
        siglip=_FEW.model.siglip,
        action_horizon=_FEW.model.action_horizon,
        camera_slots=("left_wrist_0_rgb",),
        fast_tokenizer=str(places.datasets() / "tabletop_reach_fast"),
    ),
    objective=fast.pi0_fast_tiny.objective,
)
"""It imitates 64 demonstrations of each of two tasks, as `tabletop_few` does, in tokens.

Command: python -m openpi_train tabletop_fast --exp-name x
Hardware: 2 CPU cores. Time and result: not yet measured.
"""

tabletop_fast_rloo = dataclasses.replace(
    _RLOO,
    model=tabletop_fast.model,
    objective=PolicyGradient(law=ActionTokenLaw(max_tokens=80), average="attempts"),
)
"""It goes on by policy gradients over the tokens of its chunks.

Command: python -m openpi_train tabletop_fast_rloo --exp-name x --weight-loader.params-path checkpoints/tabletop_fast/x
Hardware: 2 CPU cores. Time and result: not yet measured.
"""
