"""The board: its table stands in the docs, and every entry's commands are ones of this program."""

import dataclasses
import itertools
from pathlib import Path

import pytest

from openpi_train import cli, registry
from openpi_train.command_line import TrainFlags, parse
from openpi_train.reproduce import board, reproduce_run
from openpi_train.reproduce.board import BOARD
from openpi_train.reproduce.reproduce_request import ReproduceRequest
from openpi_train.runtime.exits import DATA, UsageError
from openpi_train.tools import evaluate_policy

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "reproduce.md"
FETCHED = ("pusht_dp", "aloha_act", "pi05_libero_trained")


def test_the_page_has_the_table_of_the_board(capsys):
    assert board.table() in PAGE.read_text()
    for words in (["reproduce"], ["reproduce", "--list"]):
        assert cli.run(words) == 0
        assert capsys.readouterr().out.strip() == board.table()


@pytest.mark.parametrize("name", BOARD)
def test_an_entry_names_an_experiment_and_what_it_acts_in(name):
    entry = BOARD[name]
    assert entry.name == name and entry.evaluations and bool(entry.extra) == bool(entry.module)
    assert all(words[0] in registry.entries() for words in entry.training_words(Path("out")).values())
    for words in entry.evaluation_words(Path("out")).values():
        request, _ = reproduce_run._evaluation(words)
        assert request.held_out == 0 and request.out is not None and request.out.is_relative_to("out/eval")
        assert bool(entry.train) == request.checkpoint.startswith("out/runs/")


@pytest.mark.parametrize("name", [name for name, entry in BOARD.items() if entry.start])
def test_a_training_begins_from_the_run_before_it(name):
    before, trained = BOARD[name].training_words(Path("out")).values()
    flags = dict(itertools.pairwise(before))
    begun = Path(flags["--checkpoint-base-dir"]) / before[0] / flags["--exp-name"]
    assert Path(dict(itertools.pairwise(trained))["--weight-loader.params-path"]) == begun
    assert BOARD[name].run_folder(Path("out")) != begun


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", [name for name, entry in BOARD.items() if "--dataset" not in entry.train])
def test_the_robot_of_an_entry_fits_what_it_acts_in(name):
    """Dims and cameras, which else only an evaluation finds out, after the training."""
    entry = BOARD[name]
    if entry.lacking:
        pytest.skip(entry.lacking)
    for words in entry.evaluation_words(Path("out")).values():
        request, _ = reproduce_run._evaluation(words)
        experiment = registry.load(request.experiment or entry.train.split()[0])
        (robot,) = [one.robot for one in experiment.demonstrations.datasets]
        env = evaluate_policy.closed_loop_of(request, experiment, 0).env
        assert (len(robot.state_names), len(robot.action_names)) == (env.state_dim, env.action_dim)
        assert {env.camera_of(camera) for camera in robot.cameras.values()} <= {*env.cameras}


@pytest.mark.parametrize("name", FETCHED)
def test_a_dry_run_without_data_checks_the_training_and_says_how_to_get_them(name, tmp_path, capsys):
    request = ReproduceRequest(name=(name,), out=tmp_path / "out")
    assert reproduce_run.main(request, TrainFlags(dry_run=True)) == DATA
    told = capsys.readouterr().out
    (path, command), *_ = BOARD[name].data_commands(request.folder).items()
    assert f"missing: {path}: get it with: {command}" in told and str(tmp_path) in command
    assert "the training is valid, but for what its data say" in told
    assert not (tmp_path / "out").exists()


def test_a_dry_run_refuses_a_training_that_cannot_start(tmp_path, monkeypatch):
    wrong = dataclasses.replace(BOARD["pusht_dp"], train="pusht_dp --batch-size 0")
    monkeypatch.setitem(BOARD, "pusht_dp", wrong)
    with pytest.raises(UsageError, match="batch"):
        reproduce_run.main(ReproduceRequest(name=("pusht_dp",), out=tmp_path), TrainFlags(dry_run=True))


def test_a_dry_run_of_what_needs_no_fetching_is_fine(tmp_path, capsys):
    request = ReproduceRequest(name=("fetch_push",), out=tmp_path / "out")
    assert reproduce_run.main(request, TrainFlags(dry_run=True)) == 0
    told = capsys.readouterr().out
    assert "made by: python -m openpi_train data collect fetch:push" in told and "get it with" not in told


def test_unknown_names_and_flags_without_one_are_refused(tmp_path):
    with pytest.raises(UsageError, match="did you mean fetch_reach"):
        reproduce_run.main(ReproduceRequest(name=("fetch_reech",)), TrainFlags())
    with pytest.raises(UsageError, match="name one entry"):
        parse(ReproduceRequest, ["fetch_reach", "fetch_push"], "reproduce")
    with pytest.raises(UsageError, match="NAME is missing"):
        parse(ReproduceRequest, ["--out", str(tmp_path)], "reproduce")
    with pytest.raises(UsageError, match="the record of"):
        parse(ReproduceRequest, ["x", "--out", str(tmp_path), "--check", f"{tmp_path}/record.json"], "reproduce")
