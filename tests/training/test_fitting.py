"""A run whose compiled step does not fit its devices takes the next candidate. The devices' memory is pretended."""

import dataclasses
import logging
import types

import jax
import pytest
from runs.command import places

from openpi_train import cli
from openpi_train.planning.compiled import needed_bytes
from openpi_train.planning.forecast import SMALL, USABLE, Machine
from openpi_train.runtime import agree
from openpi_train.runtime.device_kinds import UNKNOWN
from openpi_train.training import fitting, prepare
from openpi_train.training.fitting import fitted
from openpi_train.training.settling import Settling, open_in_turn

BYTES = "bytes of the compiled step"
POLICIES = ["none", "products", "dots", "attention", "full"]


@pytest.fixture(scope="module", autouse=True)
def each_policy_is_traced_once():
    """It costs the same whatever memory there is."""
    trace, known = prepare.policy_costs, {}

    def once(experiment, *others):
        for remat, one in experiment.remat_choices().items():
            if remat not in known:
                [known[remat]] = trace(dataclasses.replace(experiment, model=one.model), *others)
            yield known[remat]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "policy_costs", once)
        yield


@pytest.fixture
def on_devices(tmp_path):
    """The debug experiment, with policies left open, on one device of which so many bytes can be used."""
    given = cli.parse_experiment("debug", [*places(tmp_path), "--model.remat", "auto"])

    def settling(usable: float) -> Settling:
        machine = Machine(kind=UNKNOWN, num_devices=1, num_hosts=1, available_bytes=int(usable / USABLE) + 1)
        return Settling(given=given, machine=machine, opening=open_in_turn, devices=jax.devices()[:1])

    return settling


def estimates(settling: Settling) -> dict[str, int]:
    return {str(one.policy.remat): one.memory.total for one in settling.forecasts}


class FakePrograms:
    """The step of a policy, which "needs" what `needs` says; None: the compiler gives up."""

    needs: dict

    def __init__(self, trainer, *_):
        self.remat = trainer.model.remat

    def compile(self, batches):
        assert len(batches) == 1
        if self.needs[self.remat] is None:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: too large")
        sizes = dict.fromkeys(("temp", "output", "alias"), 0) | {"argument": self.needs[self.remat]}
        memory = types.SimpleNamespace(**{f"{name}_size_in_bytes": size for name, size in sizes.items()})
        self.compiled = types.SimpleNamespace(memory_analysis=lambda: memory)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("none", "others", "assumed"),
    # What the compiler says of the first candidate, and of the others, as a share of the estimates, where the first
    # one's is all that can be used; None: it gives up. And by how much the others are then assumed to be off.
    [(1.0, 1.0, None), (1.01, 1.01, 1.01), (10.0, 1.0, 10.0), (None, 1.0, 1.25), (20.0, 20.0, 20.0)],
)
def test_the_next_candidate_is_taken_until_one_fits(on_devices, monkeypatch, caplog, none, others, assumed):
    sizes = estimates(on_devices(2**20))
    settling = on_devices(sizes["none"])
    assert settling.prepared.forecast.policy.remat == "none"
    FakePrograms.needs = {name: others * size for name, size in sizes.items()}
    FakePrograms.needs["none"] = none and none * sizes["none"]
    monkeypatch.setattr(fitting, "Programs", FakePrograms)
    with caplog.at_level(logging.WARNING):
        prepared, programs = fitted(settling)
    fitting_ones = [name for name in POLICIES[1:] if assumed and assumed * sizes[name] <= sizes["none"]]
    taken = "none" if assumed is None else (fitting_ones or ["full"])[0]  # of which, if need be, the run warns
    assert (prepared.forecast.policy.remat, prepared.experiment.model.remat, programs.remat) == (taken,) * 3
    told = [line for line in caplog.messages if line.startswith("by the compiler replicated, remat ")]
    assert len(told) == (taken != "none") and all(f"remat {taken} is taken in its place" in line for line in told)


def test_all_processes_go_by_the_one_that_needs_most(on_devices, monkeypatch):
    sizes = estimates(on_devices(2**20))
    FakePrograms.needs = sizes
    monkeypatch.setattr(fitting, "Programs", FakePrograms)
    asked = []

    def gather(name, value, *_):
        asked.append(name)
        return [value, value * 2 if asked.count(BYTES) == 1 and name == BYTES else value]

    monkeypatch.setattr(agree, "gather", gather)
    prepared, _ = fitted(on_devices(sizes["none"]))
    assert prepared.forecast.policy.remat != "none" and asked.count(BYTES) == 2


def test_what_is_small_or_given_is_neither_compared_nor_compiled_before_it_starts(on_devices, monkeypatch):
    monkeypatch.setattr(fitting, "Programs", lambda *_: pytest.fail("it was compiled"))
    none = estimates(on_devices(2**20))["none"]
    small, larger = on_devices(none / SMALL + 8), on_devices(none / SMALL - 8)
    assert list(estimates(small)) == ["none"] and list(estimates(larger)) == POLICIES
    prepared, programs = fitted(small)
    assert prepared.forecast.policy.remat == "none" and programs is None
    model = dataclasses.replace(small.given.model, remat="dots")
    given = dataclasses.replace(on_devices(none), given=dataclasses.replace(small.given, model=model))
    prepared, programs = fitted(given)
    assert prepared.forecast.policy.remat == "dots" and programs is None


@pytest.mark.slow
def test_xla_for_cpus_needs_more_than_is_estimated_so_that_less_is_kept(on_devices, caplog):
    usable = 1.001 * estimates(on_devices(2**20))["none"]
    prepared, programs = fitted(on_devices(usable))
    assert prepared.forecast.policy.remat != "none" and "by the compiler replicated, remat none needs" in caplog.text
    assert programs is not None and needed_bytes(programs.compiled.memory_analysis()) <= usable
