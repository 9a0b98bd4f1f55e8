"""A run that learns from its own rollouts, without the loop: its feed, state and step."""

import dataclasses

import jax

from openpi_train.parallel.strategy import Plan
from openpi_train.rl.rollout_feed import RolloutFeed


@dataclasses.dataclass
class Made:
    feed: RolloutFeed
    state: object
    step: object
    plan: Plan
    experiment: object

    def steps(self, count):
        batches, found = [], []
        with jax.set_mesh(self.plan.real_mesh):
            for _ in range(count):
                batches.append(self.feed.next(self.state))
                self.state, metrics = self.step(self.state, batches[-1])
                found.append({name: float(value) for name, value in metrics.items()})
        return batches, found
