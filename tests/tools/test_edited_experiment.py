"""A run that goes on says what was edited in its experiment since: it keeps what it has recorded."""

import json
import logging
import re
import sys

import pytest
from vla_project import write_vla_project

from openpi_train import cli, train_verbs
from openpi_train.fields import as_json

_FILE = """
import dataclasses
from openpi_train import registry
from openpi_train.optim import AdamW, Lion

_debug = registry.load("debug")
mine = dataclasses.replace(_debug, batch_size={rows}, seed={seed}, project_name={project!r}, tensorboard={board})
mine = dataclasses.replace(mine, model=dataclasses.replace(mine.model, action_horizon={horizon}), optimizer={optimizer})
"""
_VALUES = {"rows": 4, "seed": 3, "project": "old", "board": True, "horizon": 8, "optimizer": "AdamW()"}


@pytest.fixture
def asked(monkeypatch, tmp_path, caplog):
    """What a command line would train, and what was warned of; each start is recorded as training does."""
    monkeypatch.chdir(tmp_path)
    found = []
    monkeypatch.setattr(train_verbs, "_run", lambda experiment, process: found.append(experiment) or 0)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def ask(*words, changed=(), program="openpi_train/__main__.py"):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            assert cli.run([*map(str, words)]) == 0
        experiment = found.pop()
        run = experiment.run_dir
        file = run / "environment.json"
        starts = json.loads(file.read_text())["starts"] if experiment.resume and file.is_file() else []
        run.mkdir(parents=True, exist_ok=True)
        start = {"argv": [program, *map(str, words)], "directory": str(tmp_path), "changed": dict.fromkeys(changed)}
        file.write_text(json.dumps({"starts": [*starts, start]}))
        (run / "experiment.json").write_text(json.dumps(as_json(experiment)))
        warned = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
        return experiment, "\n".join(one for one in warned if "was edited" in one)

    def write(**values):
        (tmp_path / "edited_runs.py").write_text(_FILE.format(**{**_VALUES, **values}))
        sys.modules.pop("edited_runs", None)  # Python keeps a module that it has read
        return "edited_runs.py:mine"

    ask.write = write
    return ask


def lines(text):
    """What is typed to take the new value, by field."""
    return dict(re.findall(r"^  ([\w.]+): .* today: (.*)$", text, re.MULTILINE))


@pytest.mark.parametrize("again", [("edited_runs.py:mine", "--exp-name", "x", "--resume"), ("resume", "RUN")])
def test_an_edit_is_told_with_the_flag_that_takes_it(asked, again):
    asked("train", asked.write(), "--exp-name", "x", "--seed", "9")
    again = tuple(word.replace("RUN", "checkpoints/mine/x") for word in again)
    assert asked(*again)[1] == "", "nothing was edited"
    asked.write(rows=16, seed=5, project="two words", board=False)
    experiment, told = asked(*again)
    assert (experiment.batch_size, experiment.seed) == (4, 9), "the run keeps its own"
    assert lines(told) == {
        "batch_size": "--batch-size 16",
        "project_name": "--project-name 'two words'",
        "tensorboard": "--no-tensorboard",
    }, "the seed was a flag, which counts more than the file"
    assert "batch_size: 4 in the run, 16 today" in told
    flags = ["--batch-size", "16", "--project-name", "mine", "--no-tensorboard"]
    experiment, told = asked(*again, *flags, changed=("batch_size", "project_name", "tensorboard"))
    assert experiment.batch_size == 16 and told == "", "what is typed was chosen"
    assert asked(*again)[1] == "", "and stays so"


def test_what_no_flag_takes_is_told_as_such(asked):
    asked(asked.write(), "--exp-name", "x")
    asked.write(horizon=4, optimizer="Lion()")
    told = lines(asked("resume", "checkpoints/mine/x")[1])
    assert told["model.action_horizon"] == "a run cannot change it; train it under another --exp-name"
    assert told["optimizer.__class__"] == "a run cannot change it; train it under another --exp-name"
    assert not [name for name in told if name.startswith("optimizer.") and name != "optimizer.__class__"]


def test_a_file_of_deepspeed_that_the_line_names_counts_too(asked, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "eps": 1e-8}}}))
    asked("debug", "--exp-name", "x", "--deepspeed", "ds.json")
    assert asked("debug", "--exp-name", "x", "--resume")[1] == ""
    file.write_text(json.dumps({"optimizer": {"type": "AdamW", "params": {"lr": 2e-4, "eps": 1e-8}}}))
    told = asked("debug", "--exp-name", "x", "--resume")[1]
    assert lines(told)["lr_schedule.peak_lr"] == "--lr-schedule.peak-lr 0.0002"
    assert asked("debug", "--exp-name", "x", "--resume", "--deepspeed", "ds.json")[1] == ""


def test_an_edited_config_of_another_tool_is_told_where_the_run_goes_on_by_its_folder(asked, tmp_path):
    write_vla_project(tmp_path)
    begun, _ = asked("vla", "--config", "configs/vla_config.yaml")
    assert asked("resume", begun.run_dir)[1] == ""
    config = tmp_path / "configs" / "vla_config.yaml"
    text = config.read_text()
    edited = re.sub(r"(?m)^(\s*lr:).*$", r"\1 3.0e-6", text)
    assert edited != text
    config.write_text(edited)
    assert lines(asked("resume", begun.run_dir)[1]) == {"lr_schedule.peak_lr": "--lr-schedule.peak-lr 3e-06"}


def test_what_cannot_be_compared_is_no_edit(asked, tmp_path, caplog):
    name = asked.write()
    begun, _ = asked(name, "--exp-name", "x")
    (tmp_path / "edited_runs.py").unlink()
    assert asked("resume", begun.run_dir)[1] == ""
    assert "whether the experiment was edited since the start is not known" in caplog.text
    # A run that began at another one has its values.
    asked("debug", "--exp-name", "a", "--batch-size", "2")
    (tmp_path / "checkpoints" / "debug" / "a" / "20").mkdir()
    asked("debug", "--exp-name", "b", "--resume-from", "checkpoints/debug/a/20")
    assert asked("debug", "--exp-name", "b", "--resume")[1] == ""


def test_the_steps_that_epochs_were_found_to_be_are_no_edit(asked):
    """A start records them beside the number of epochs (`Settling.recorded`)."""
    experiment, _ = asked("debug", "--exp-name", "x", "--num-epochs", "60")
    file = experiment.run_dir / "experiment.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_train_steps": 375}))
    experiment, told = asked("debug", "--exp-name", "x", "--num-epochs", "60", "--resume")
    assert (experiment.num_epochs, experiment.num_train_steps, told) == (60, 375, "")
    assert asked("resume", "checkpoints/debug/x")[1] == ""
