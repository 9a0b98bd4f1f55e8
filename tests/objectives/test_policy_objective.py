"""What a run asks of an objective that learns from rollouts, and of one that does not."""

import pytest

from openpi_train.objectives.diffusion import Diffusion
from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.objectives.indicator_flow import IndicatorFlow
from openpi_train.objectives.policy_gradient import PolicyGradient
from openpi_train.objectives.policy_objective import PolicyObjective, distribution_of
from openpi_train.objectives.weighted_flow import WeightedFlow
from openpi_train.rl.estimator import AdvantageEstimator
from openpi_train.rl.rollout_log_probs import NeededScores
from openpi_train.sampling.token_distribution import TokenDistribution


@pytest.mark.parametrize("objective", [PolicyGradient(), WeightedFlow(), IndicatorFlow()])
def test_an_objective_of_rollouts_has_their_distribution_and_neither_reference_nor_critic_by_default(objective):
    assert isinstance(objective, PolicyObjective) and objective.learns_from_rollouts
    assert distribution_of(objective) is objective.distribution
    assert not objective.has_reference and not objective.has_critic


@pytest.mark.parametrize("objective", [FlowMatching(), Diffusion()])
def test_an_objective_of_demonstrations_has_no_distribution(objective):
    assert not objective.learns_from_rollouts and distribution_of(objective) is None


def test_regression_neither_compares_with_the_policy_that_acted_nor_asks_for_a_reference():
    class Run:
        advantages = AdvantageEstimator()

    for objective in (WeightedFlow(), IndicatorFlow()):
        assert not NeededScores.of(objective, Run, num_steps=4).any
    gradient = PolicyGradient(distribution=TokenDistribution(), kl_weight=0.1, value_weight=0.1)
    assert NeededScores.of(gradient, Run, num_steps=1) == NeededScores(
        is_compared=False, with_reference=True, with_values=True
    )
    assert NeededScores.of(PolicyGradient(), Run, num_steps=2).is_compared
