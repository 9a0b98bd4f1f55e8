"""One name for experiments of several action dims: which one a dataset gets, and what an unknown dataset is told."""

import dataclasses
import logging
import sys
from pathlib import Path

import pytest

from openpi_train import cli, registry
from openpi_train.choice import source_of, weighted_path
from openpi_train.data.text.text_data import TextDataset
from openpi_train.envs.tabletop_env import TabletopEnv
from openpi_train.runtime.exits import DataError, UsageError

STORES = Path(__file__).parent / "data" / "formats" / "zarr" / "fixtures"
FILE = """
import dataclasses
from openpi_train.choice import ByActionDim
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.data.make.fake import FakeData
from openpi_train.data.formats.zarr import Zarr
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


@pytest.mark.parametrize("flag", ["--env", "--rl.env"])
def test_the_environment_of_the_command_line_is_that_of_evaluations_and_of_rl(flag):
    given = ["--exp-name", "x", flag, "tabletop", "--rl.tasks", "stack_red_blue", "0"]
    found = cli.parse_experiment("tabletop_few_rloo", given)
    assert found.rl.env == found.eval.closed_loop.env == TabletopEnv()
    assert found.rl.tasks == ("stack_red_blue", "0")
    imitates = cli.parse_experiment("tabletop_few", ["--exp-name", "x", "--env", "tabletop"])
    assert imitates.eval.closed_loop.env == TabletopEnv() and imitates.rl is None


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


def words_of(*mixture, then=()):
    return ["--exp-name", "x", "--data.mixture", *mixture, *then]


@pytest.mark.parametrize(
    ("word", "path", "weight"),
    [
        ("more.jsonl", "more.jsonl", 1),
        ("more.jsonl:0.25", "more.jsonl", 0.25),
        ("hub:trl-lib/tldr", "hub:trl-lib/tldr", 1),
        ("hub:trl-lib/tldr@main:3", "hub:trl-lib/tldr@main", 3),
        ("gs://bucket/own", "gs://bucket/own", 1),
        ("a:b.jsonl:1", "a:b.jsonl", 1),
    ],
)
def test_a_weight_follows_the_last_colon_of_a_path(word, path, weight):
    assert weighted_path(word) == (path, weight)


def test_texts_are_mixed_from_the_command_line():
    own = registry.load("arithmetic_sft").data.datasets[0]
    columns = ("--data.datasets.1.columns", "prompt=question", "completion=answer")
    given = words_of(f"{own.path}/../demonstrations:3", "/x/more.jsonl:1", then=(*columns, "--seed", "5"))
    found = cli.parse_experiment("arithmetic_sft", given)
    assert found.seed == 5 and found.data.mixture_in_words == "demonstrations 75 %, more 25 %"
    kept, added = found.data.datasets
    # A dataset of the experiment's own keeps its fields; another one has those of its type.
    assert kept == dataclasses.replace(own, weight=3) and kept.validation is not None
    assert added == TextDataset(path="/x/more.jsonl", weight=1, columns=columns[1:])
    alone = cli.parse_experiment("arithmetic_sft", words_of("/x/more.jsonl"))
    assert [one.path for one in alone.data.datasets] == ["/x/more.jsonl"] and not alone.data.mixture_in_words


def test_demonstrations_are_mixed_from_the_command_line(toys):
    stores = [f"{STORES}/arms_14.zarr", f"{STORES}/arms_16.zarr"]
    own = registry.load(f"{toys}:robot_14").data.datasets[0]
    flags = ("--data.datasets.1.prompt", "stack", "--data.datasets.1.robot.state-column", "other")
    found = cli.parse_experiment(f"{toys}:robot", words_of(stores[0], f"{stores[1]}:0.5", then=flags))
    # The first one decides which experiment it is.
    assert found.name == "robot_14" and found.data.mixture_in_words == "arms_14.zarr 66.67 %, arms_16.zarr 33.33 %"
    assert [one.source.path for one in found.data.datasets] == stores
    first, second = found.data.datasets
    assert first.robot == own.robot and second.robot == dataclasses.replace(own.robot, state_column="other")
    assert (first.prompt, second.prompt, first.weight, second.weight) == (own.prompt, "stack", 1, 0.5)


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("arithmetic_sft", words_of("a.jsonl:heavy"), r"the weight 'heavy' is no number.*a\.jsonl:heavy:1"),
        ("arithmetic_sft", words_of("a.jsonl:0"), "weight 0 must be a number above 0; leave the dataset out"),
        ("arithmetic_sft", words_of("a.jsonl:nan"), "weight nan must be a number above 0"),
        ("arithmetic_sft", words_of("a.jsonl:inf"), "weight inf must be a number above 0"),
        ("arithmetic_sft", words_of(":2"), "no path"),
        ("arithmetic_sft", words_of(), "needs at least one dataset"),
        ("arithmetic_sft", words_of("a.jsonl", "./a.jsonl:2"), r"has \./a\.jsonl and a\.jsonl twice: give it once"),
        ("debug", words_of("a.jsonl", then=("--dataset", "b")), "--dataset and --data.mixture both"),
        ("debug", words_of("/nowhere"), "/nowhere does not exist"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(name, words, message):
    with pytest.raises((UsageError, DataError), match=message):
        cli.parse_experiment(name, words)


def test_the_command_line_may_number_more_rewards_than_the_experiment_has():
    words = ["--exp-name", "x", "--rl.rewards.2.name", "overlong:2", "--rl.rewards.1.weight", "0.5"]
    found = cli.parse_experiment("arithmetic_grpo", [*words, "--rl.rewards.1.name=regex:.*"])
    assert [(one.name, one.weight) for one in found.rl.rewards] == [
        ("exact_match", 1.0),
        ("regex:.*", 0.5),
        ("overlong:2", 1.0),
    ]
    found.check(1)
    with pytest.raises(SystemExit, match="2"):
        cli.parse_experiment("arithmetic_grpo", words)  # there is no 1


def test_texts_in_place_of_demonstrations_are_told_with_the_experiments_that_take_them(tmp_path):
    (tmp_path / "chat.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "notes").mkdir()
    for path in (tmp_path, tmp_path / "chat.jsonl"):
        with pytest.raises(UsageError, match=f"{path} holds texts, .* lm_sft, .* --dataset {path}"):
            source_of(str(path))
    for path in (tmp_path / "notes", tmp_path / "nowhere"):
        texts = r"language model's experiment, such as lm_sft, takes texts: .*\.jsonl, .*\.parquet"
        with pytest.raises(DataError, match=f"RLDS dataset.*{texts}.* or hub:USER/NAME"):
            source_of(str(path))
