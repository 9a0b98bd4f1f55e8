"""What is told of start weights before a run begins."""

import dataclasses

import pytest
from rl.wandering import roaming

from openpi_train.checkpoints.weights import WeightLoader
from openpi_train.fields import as_json
from openpi_train.objectives.diffusion import Diffusion
from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.objectives.policy_gradient import PolicyGradient
from openpi_train.runtime.exits import UsageError
from openpi_train.sampling.denoising_distribution import DenoisingDistribution
from openpi_train.sampling.flow_distribution import FlowDistribution
from openpi_train.training.start_check import check_start_weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorded(WeightLoader):
    trained: object = None

    def load(self, model):
        raise AssertionError

    def objective(self):
        return self.trained if self.trained is None or isinstance(self.trained, dict) else as_json(self.trained)


def starting(trained, distribution, **changes):
    fields = {
        "objective": PolicyGradient(distribution=distribution),
        "weight_loader": Recorded(trained=trained),
        **changes,
    }
    return dataclasses.replace(roaming, **fields)


@pytest.mark.parametrize(
    ("trained", "distribution"), [(Diffusion(), FlowDistribution()), (FlowMatching(), DenoisingDistribution())]
)
def test_a_distribution_that_takes_what_a_policy_predicts_for_something_else_is_refused(trained, distribution):
    name = f"trained by {type(trained).__name__}, .* and the distribution {type(distribution).__name__} acts"
    with pytest.raises(UsageError, match=name):
        check_start_weights(starting(trained, distribution))
    # Imitation may go on in another way, and learns what it predicts anew.
    check_start_weights(starting(trained, distribution, rl=None))


@pytest.mark.parametrize(
    ("trained", "distribution"),
    [
        (Diffusion(), DenoisingDistribution()),
        (FlowMatching(), FlowDistribution()),
        (PolicyGradient(distribution=FlowDistribution()), FlowDistribution()),
        (None, FlowDistribution()),
        ({"__class__": "OfAFileThatIsGone"}, FlowDistribution()),
    ],
)
def test_distributions_that_fit_and_weights_that_tell_nothing_are_taken(trained, distribution):
    check_start_weights(starting(trained, distribution))
