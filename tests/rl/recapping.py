"""The policy of RECAP on the Fetch arm, small, without its environment: `tests/runs/test_recap_run.py` runs it."""

import dataclasses

from openpi_train_configs.fetch_recap import fetch_reach_recap

from openpi_train.envs.closed_loop import ClosedLoop

recapping = dataclasses.replace(
    fetch_reach_recap,
    name="recapping",
    eval=dataclasses.replace(fetch_reach_recap.eval, interval=0, closed_loop=ClosedLoop()),
)
"""It is told which stored steps were better."""
