"""Every experiment of `configs/` comes back from its JSON as it was; what is not known is told."""

import json

import pytest

from openpi_train import registry
from openpi_train.data.core.source import SourceConfig
from openpi_train.data.formats.zarr import Zarr
from openpi_train.fields import as_json
from openpi_train.interop.config_json import _modules_with
from openpi_train.policy.experiment_json import experiment_from_json
from openpi_train.runtime.exits import CheckpointError


def stored(experiment):
    return json.loads(json.dumps(as_json(experiment)))


@pytest.mark.parametrize("name", registry.entries())
def test_an_experiment_comes_back_as_it_was(name):
    experiment = registry.load(name, any_dims=True)
    assert experiment_from_json(stored(experiment)) == experiment


def test_a_member_of_an_enumeration_comes_back_as_one():
    experiment = experiment_from_json(stored(registry.load("tabletop_dp")))
    assert experiment.eval.closed_loop.env.tasks == ("reach_red",)  # named after a member


@pytest.mark.parametrize(("name", "old"), [("pi0_tabletop_reach", "Tabletop"), ("metaworld_mt5_dp", "MetaWorld")])
def test_an_environment_is_found_by_its_old_name(name, old):
    value = stored(registry.load(name))
    assert value["eval"]["closed_loop"]["env"]["__class__"] == f"{old}Env"
    value["eval"]["closed_loop"]["env"]["__class__"] = old
    assert value["data"]["datasets"][0]["robot"]["__class__"] == old  # the robot's name, then and now
    assert experiment_from_json(value) == registry.load(name)


def test_a_dataset_is_found_in_another_folder_than_what_all_are_based_on():
    assert _modules_with("Zarr", SourceConfig.__module__) == [Zarr.__module__]


def test_a_class_that_is_not_ours_is_found_in_the_experiment_given(tmp_path):
    file = tmp_path / "own_robot_runs.py"
    file.write_text(
        "import dataclasses\n"
        "from openpi_train import registry\n"
        "from openpi_train.robots.bridge import Bridge\n"
        "@dataclasses.dataclass(frozen=True, kw_only=True)\n"
        "class Mine(Bridge):\n"
        "    extra: int = 3\n"
        "_debug = registry.load('debug')\n"
        "_dataset = dataclasses.replace(_debug.data.datasets[0], robot=Mine(extra=4))\n"
        "mine = dataclasses.replace(_debug, data=dataclasses.replace(_debug.data, datasets=(_dataset,)))\n"
    )
    experiment = registry.load(f"{file}:mine")
    with pytest.raises(CheckpointError, match=r"datasets\.0\.robot is a Mine.*--experiment my_runs\.py:NAME"):
        experiment_from_json(stored(experiment))
    assert experiment_from_json(stored(experiment), experiment) == experiment


def test_a_field_of_another_version_is_named():
    value = stored(registry.load("debug"))
    value["model"]["new_field"] = 1
    with pytest.raises(CheckpointError, match=r"Pi0Config has no new_field here.*another version"):
        experiment_from_json(value)


def test_a_class_of_another_kind_is_not_taken():
    value = stored(registry.load("debug"))
    value["model"]["__class__"] = "AdamW"
    with pytest.raises(CheckpointError, match=r"experiment\.model is a AdamW"):
        experiment_from_json(value)
