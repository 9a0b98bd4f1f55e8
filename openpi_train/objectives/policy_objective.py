"""What objectives have that learn from the policy's own rollouts.

Read next: `policy_gradient.py`, `weighted_flow.py`.
"""

import abc
import dataclasses
from typing import ClassVar

from openpi_train.objectives.objective import Objective
from openpi_train.sampling.distribution import Distribution


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyObjective(Objective, abc.ABC):
    """An objective that learns from the policy's own rollouts (`types.RolloutBatch`)."""

    learns_from_rollouts: ClassVar[bool] = True
    # Whether it compares with the log-probabilities of these rollouts under the policy that made them.
    scores_rollouts: ClassVar[bool] = False
    # Whether it learns from demonstrations beside these rollouts (`RolloutBatch.demonstrations`).
    uses_demonstrations: ClassVar[bool] = False

    # How actions are drawn; rollouts are made and scored by it.
    distribution: Distribution

    @property
    def has_reference(self) -> bool:
        """Whether its loss has a divergence from a reference (default: it has not)."""
        return False

    @property
    def has_critic(self) -> bool:
        """Whether it trains a critic (default: it does not)."""
        return False


def distribution_of(objective: Objective) -> Distribution | None:
    """How actions are drawn in the rollouts that the objective learns from; None if it learns from none."""
    return objective.distribution if isinstance(objective, PolicyObjective) else None
