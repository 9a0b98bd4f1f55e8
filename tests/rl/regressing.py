"""Runs of the tabletop's experiments that learn by regression, with a policy and a world of a few numbers.

`tests/runs/test_regression_run.py` runs them, by this file's name.
"""

import dataclasses

from openpi_train_configs import tabletop_regression
from reaching import TABLETOP, reaching

from openpi_train.envs.closed_loop import ClosedLoop


def _small(experiment, **rl):
    """An iteration of this experiment is two optimizer steps, with four episodes of two queries each."""
    return dataclasses.replace(
        experiment,
        model=dataclasses.replace(reaching.model, indicator=experiment.model.indicator),
        objective=dataclasses.replace(
            experiment.objective,
            distribution=dataclasses.replace(experiment.objective.distribution, num_steps=2),
            num_imitated=2,
            num_flow_draws=2,
        ),
        data=reaching.data,
        rl=dataclasses.replace(experiment.rl, env=TABLETOP, num_groups=2, group_size=2, execute=2, max_steps=4, **rl),
        batch_size=2,
        num_train_steps=2,
        save_interval=2,
        log_interval=1,
        eval=dataclasses.replace(experiment.eval, interval=0, num_sample_steps=2, closed_loop=ClosedLoop()),
    )


weighing = dataclasses.replace(_small(tabletop_regression.tabletop_few_weighted), name="weighing")
weighing = dataclasses.replace(weighing, objective=dataclasses.replace(weighing.objective, weights="exponential"))
"""All episodes count, the better ones more: even where none succeeds, something is learnt."""

told = dataclasses.replace(_small(tabletop_regression.tabletop_few_indicator, num_demonstrations=3), name="told")
"""It is told how good its episodes were."""
