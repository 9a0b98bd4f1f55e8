"""One name for experiments of several action dims: which one a dataset gets, and what an unknown dataset is told."""

import logging
import sys
from pathlib import Path

import pytest

from openpi_train import cli, registry
from openpi_train.envs.tabletop_env import TabletopEnv
from openpi_train.runtime.exits import DataError, UsageError

STORES = Path(__file__).parent / "data" / "zarr" / "fixtures"
FILE = """
import dataclasses
from openpi_train.choice import ByActionDim
from openpi_train.data.config import DataConfig, Dataset
from openpi_train.data.fake import FakeData
from openpi_train.data.zarr import Zarr
from openpi_train_configs.debug import debug


def on(dims):
    dataset = Dataset(source=FakeData(state_dim=dims, num_episodes=3), robot=debug.data.datasets[0].robot)
    return dataclasses.replace(debug, data=DataConfig(datasets=(dataset,)))


arm_7 = dataclasses.replace(on(7), batch_size=16)
arm_14 = dataclasses.replace(on(14), batch_size=24)
arm = ByActionDim(experiments={7: arm_7, 14: arm_14})
'''A toy on one arm or two.'''

def stored(dims):
    dataset = dataclasses.replace(debug.data.datasets[0], source=Zarr(path="nowhere.zarr"))
    return dataclasses.replace(debug, batch_size=dims, data=dataclasses.replace(debug.data, datasets=(dataset,)))


robot_14, robot_16 = stored(14), stored(16)
robot = ByActionDim(experiments={14: robot_14, 16: robot_16})
'''A toy whose dataset the command line names.'''
other = ByActionDim(experiments={10: on(9)})
'''A toy whose own dataset it does not know.'''
"""


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    file = tmp_path_factory.mktemp("choice") / "toys_by_dims.py"
    file.write_text(FILE)
    yield str(file)
    sys.path.remove(str(file.parent))


def test_the_dataset_says_which_experiment_is_meant(toys, caplog):
    with caplog.at_level(logging.INFO):
        own = registry.load(f"{toys}:arm")
    assert (own.name, own.batch_size) == ("arm_7", 16)
    assert "the dataset has 7 action dims, so this is arm_7" in caplog.text
    of_14 = registry.load(f"{toys}:arm_14").data.datasets[0].source
    other = registry.load(f"{toys}:arm", lambda own: of_14)
    assert (other.name, other.batch_size) == ("arm_14", 24)


def test_fields_are_flags_of_the_chosen_one_and_help_needs_no_dataset(toys, capsys):
    experiment = cli.parse_experiment(f"{toys}:arm", ["--exp-name", "x", "--log-interval", "7"])
    assert (experiment.name, experiment.batch_size, experiment.log_interval) == ("arm_7", 16, 7)
    with pytest.raises(SystemExit) as ended:
        cli.parse_experiment(f"{toys}:other", ["--help"])
    assert ended.value.code == 0
    assert "A toy whose own dataset it does not know" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("dims", "form"),
    [(14, "--dataset {}"), (16, "--data.datasets.0.source.path {}"), (16, "--data.datasets.0.source.path={}")],
)
def test_the_dataset_that_the_command_line_names_decides(toys, dims, form):
    path = f"{STORES}/arms_{dims}.zarr"
    experiment = cli.parse_experiment(f"{toys}:robot", ["--exp-name", "x", *form.format(path).split()])
    assert (experiment.name, experiment.batch_size) == (f"robot_{dims}", dims)
    assert experiment.data.datasets[0].source.path == path


def test_unknown_dims_or_column_are_an_error_with_what_was_found_and_what_is_known(toys):
    with pytest.raises(
        DataError, match=r"'action', and FakeData has \[9\] per step there \(it has action \[9\], .*Known: 10"
    ):
        registry.load(f"{toys}:other")
    with pytest.raises(DataError, match=r"Known: 7, 14 dims\. Give another dataset with --dataset PATH"):
        registry.load(f"{toys}:arm", lambda own: type(own)(state_dim=12))


def test_the_environment_of_the_command_line_is_that_of_evaluations_and_of_practice():
    given = ["--exp-name", "x", "--env", "tabletop", "--practice.tasks", "stack_red_blue", "0"]
    found = cli.parse_experiment("tabletop_few_rloo", given)
    assert found.practice.env == found.eval.closed_loop.env == TabletopEnv()
    assert found.practice.tasks == ("stack_red_blue", "0")
    imitates = cli.parse_experiment("tabletop_few", ["--exp-name", "x", "--env", "tabletop"])
    assert imitates.eval.closed_loop.env == TabletopEnv() and imitates.practice is None


@pytest.mark.parametrize(
    ("experiment", "env", "message"),
    [
        ("tabletop_few", "tabletpo", "no environment 'tabletpo'; did you mean tabletop"),
        ("arithmetic_grpo", "tabletop", "this is for robot policies"),
    ],
)
def test_an_environment_that_cannot_be_is_refused(experiment, env, message):
    with pytest.raises(UsageError, match=message):
        cli.parse_experiment(experiment, ["--exp-name", "x", "--env", env])
