"""Small runs that learn from their own episodes on the embedded tabletop by regression, without probabilities.

They start from the weights of `tabletop_few`, as `tabletop_few_rloo` does (docs/howto/reinforcement_learning.md).
"""

import dataclasses

from openpi_train_configs import tabletop_rl

from openpi_train.objectives.indicator_flow import IndicatorFlow
from openpi_train.objectives.weighted_flow import WeightedFlow
from openpi_train.optim import LRSchedule
from openpi_train.sampling.flow_distribution import FlowDistribution

_RLOO = tabletop_rl.tabletop_few_rloo

tabletop_few_weighted = dataclasses.replace(
    _RLOO,
    objective=WeightedFlow(distribution=FlowDistribution(num_steps=4, noise=0.0), num_imitated=4),
    lr_schedule=LRSchedule(warmup_steps=0, peak_lr=5e-4, decay_steps=280, decay_lr=5e-4),
)
"""It imitates those of its own episodes that succeed more often than the others from the same initial state.

Command: python -m openpi_train tabletop_few_weighted --exp-name x
    --weight-loader.params-path checkpoints/tabletop_few/x
Hardware: 2 CPU cores. Time and result: not yet measured.
"""

tabletop_few_indicator = dataclasses.replace(
    _RLOO,
    model=dataclasses.replace(_RLOO.model, indicator=True),
    objective=IndicatorFlow(
        distribution=FlowDistribution(num_steps=4, noise=0.0, guidance=1.0), guidance=2.0, num_imitated=4
    ),
    rl=dataclasses.replace(_RLOO.rl, num_demonstrations=10),
    lr_schedule=LRSchedule(warmup_steps=0, peak_lr=5e-4, decay_steps=280, decay_lr=5e-4),
)
"""It is told which of its own episodes succeed more often than the others, beside as many chunks of demonstrations, and
is evaluated with guidance towards such ones.

Command: python -m openpi_train tabletop_few_indicator --exp-name x
    --weight-loader.params-path checkpoints/tabletop_few/x
Hardware: 2 CPU cores. Time and result: not yet measured.
"""
