"""Families of models are found by their configs; none takes the name of another, or of its formats."""

import dataclasses
import types

import pytest

from openpi_train import families
from openpi_train.checkpoints import checkpoint_formats
from openpi_train.interop.checkpoint_format import Format
from openpi_train.interop.exchange import Exchange
from openpi_train.models.act import ActConfig
from openpi_train.models.language.reward import RewardConfig
from openpi_train.models.pi0 import Pi0Config


class TunedActConfig(ActConfig):
    """A user's own kind of ACT."""


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(families, "_REGISTERED", dict(families._REGISTERED))


def form(name):
    return Format(name=name, summary="", recognises=lambda place: False, open=lambda place, model: None)


def test_a_model_has_the_family_of_its_class_or_of_one_above_it():
    assert families.exchange_of(Pi0Config()).family == "pi0"
    assert families.exchange_of(TunedActConfig()).family == "act"
    assert families.exchange_of(types.SimpleNamespace()) == Exchange(
        family="SimpleNamespace", models=(types.SimpleNamespace,)
    )


def test_the_family_that_was_registered_last_goes_first():
    families.register(Exchange(family="tuned", models=(TunedActConfig,), formats=(form("tuned"),)))
    assert families.exchange_of(TunedActConfig()).family == "tuned"
    assert families.exchange_of(ActConfig()).family == "act"
    assert families.formats()[-1].name == "tuned"


def test_what_a_file_registers_again_replaces_the_former():
    own = Exchange(family="tuned", models=(TunedActConfig,), formats=(form("tuned"),))
    families.register(own)
    # As an import of the same file makes it: another class of the same name.
    again = type("TunedActConfig", (ActConfig,), {"__module__": __name__, "__qualname__": "TunedActConfig"})
    families.register(dataclasses.replace(own, models=(again,)))
    assert [one.models for one in families.registered() if one.family == "tuned"] == [(again,)]


def test_formats_of_several_families_are_listed_by_name():
    found = [one.name for one in checkpoint_formats.formats() if one not in families.formats()]
    assert found == [*families.COMMON_FORMATS]


@pytest.mark.parametrize(
    ("family", "name", "says"),
    [
        ("act", "mine", "'act' is taken by openpi_train.models.act.act.ActConfig"),
        ("mine", "lerobot", "'lerobot', which is one of all families"),
        ("mine", "peft", "'peft', as language has"),
    ],
)
def test_a_name_that_is_taken_is_refused(family, name, says):
    with pytest.raises(ValueError, match=says):
        families.register(Exchange(family=family, models=(RewardConfig,), formats=(form(name),)))
