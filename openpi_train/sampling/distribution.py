"""The interface of policy distributions: how a policy draws what it does, and with which probability.

Whoever acts and whoever learns from it use the same one: a ratio of probabilities under two different distributions
starts at 1, too, and its gradient is that of another policy. Read next: `token_distribution.py`, then
`objectives/policy_gradient.py`.
"""

import abc
import dataclasses
from typing import ClassVar

from jaxtyping import Array, Float

from openpi_train.sampling.action_sampler import ActionSampler, OwnSampler
from openpi_train.types import Network, Tree, pytree


@pytree
class UnitScores:
    """The log-probability of every unit of recorded rollouts (a token, a denoising step), and the entropy there."""

    log_prob: Float[Array, "b u"]
    entropy: Float[Array, "b u"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distribution(abc.ABC):
    """Config of a distribution. `needs` is compared with the model's `provides`."""

    needs: ClassVar[frozenset[str]] = frozenset()

    def check(self) -> list[str]:
        """Invalid values, as sentences that name the field (default: none)."""
        return []

    @property
    def needed(self) -> frozenset[str]:
        """What the model must provide: `needs`, and what the fields ask for."""
        return self.needs

    @property
    def action_sampler(self) -> ActionSampler:
        """The sampler of a robot's actions, without chance, of a policy that acts by this (default: its own)."""
        return OwnSampler()

    @property
    def draws_per_row(self) -> int:
        """How many times the action part of the model runs for one row (for cost forecasts)."""
        return 1

    @abc.abstractmethod
    def scores(self, model: Network, traces: Tree) -> UnitScores:
        """The probabilities of these traces under a model. Units that no rollout has get any finite numbers."""

    @abc.abstractmethod
    def values(self, model: Network, traces: Tree) -> Float[Array, "b u"]:
        """What the critic in `model` expects before each unit."""
