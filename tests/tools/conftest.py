"""What tests of plans share. Read next: `test_plan.py`."""

from collections.abc import Iterator

import pytest

from openpi_train.training import prepare


@pytest.fixture(scope="module")
def each_step_is_traced_once() -> Iterator[None]:
    """Without convolutions policies cost the same on any machine that has several devices, or one, and with any batch:
    pi0's steps are traced once."""
    trace, known = prepare.policy_costs, {}

    def once(experiment, state, *others):
        what = (experiment.model, experiment.objective, experiment.data.cameras, experiment.freeze)
        key = repr((*what, experiment.sharding.tensor_devices, experiment.unroll_layers))
        if key not in known:
            known[key] = [*trace(experiment, state, *others)]
        return iter(known[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "policy_costs", once)
        yield
