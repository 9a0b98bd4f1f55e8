"""What is told of start weights before a run begins."""

import dataclasses

import pytest
from practice.wandering import roaming

from openpi_train.fields import as_json
from openpi_train.interop.weights import WeightLoader
from openpi_train.objectives.diffusion import Diffusion
from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.objectives.policy_gradient import PolicyGradient
from openpi_train.runtime.exits import UsageError
from openpi_train.sampling.denoising_law import DenoisingLaw
from openpi_train.sampling.flow_law import FlowLaw
from openpi_train.training.start_check import check_start_weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorded(WeightLoader):
    trained: object = None

    def load(self, model):
        raise AssertionError

    def objective(self):
        return self.trained if self.trained is None or isinstance(self.trained, dict) else as_json(self.trained)


def starting(trained, law, **changes):
    fields = {"objective": PolicyGradient(law=law), "weight_loader": Recorded(trained=trained), **changes}
    return dataclasses.replace(roaming, **fields)


@pytest.mark.parametrize(("trained", "law"), [(Diffusion(), FlowLaw()), (FlowMatching(), DenoisingLaw())])
def test_a_law_that_takes_what_a_policy_predicts_for_something_else_is_refused(trained, law):
    name = f"trained by {type(trained).__name__}, .* and the law {type(law).__name__} acts"
    with pytest.raises(UsageError, match=name):
        check_start_weights(starting(trained, law))
    # Imitation may go on in another way, and learns what it predicts anew.
    check_start_weights(starting(trained, law, practice=None))


@pytest.mark.parametrize(
    ("trained", "law"),
    [
        (Diffusion(), DenoisingLaw()),
        (FlowMatching(), FlowLaw()),
        (PolicyGradient(law=FlowLaw()), FlowLaw()),
        (None, FlowLaw()),
        ({"__class__": "OfAFileThatIsGone"}, FlowLaw()),
    ],
)
def test_laws_that_fit_and_weights_that_tell_nothing_are_taken(trained, law):
    check_start_weights(starting(trained, law))
