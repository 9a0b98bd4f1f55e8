"""A run goes on as it was started: what it has recorded, under the flags that are given now."""

import dataclasses
import errno
import json
import logging
import re
from pathlib import Path

import pytest
from openpi_train_configs.debug import debug
from posttraining_project import write_project
from vla_project import write_vla_project

from openpi_train import cli, registry, train_verbs
from openpi_train.data.core.files import read_json
from openpi_train.fields import as_json
from openpi_train.policy.experiment_json import experiment_of_run
from openpi_train.runtime import passing_errors
from openpi_train.runtime.exits import PEER_LOST, CheckpointError, UsageError
from openpi_train.tools.requests import ResumeRequest
from openpi_train.tools.resume_run import experiment_of
from openpi_train.training import run_record

# As many flags as a run has.
FLAGS = (
    "--batch-size 4 --seed 5 --model.siglip.width 32 --model.siglip.mlp-dim 32 --num-train-steps 60 --save-interval 20 "
    "--lr-schedule.peak-lr 1e-4 --ema-decay 0.5 --no-tensorboard --log-interval 3 --keep-last 4 --profile 2 "
    "--data.validation-fraction 0.3 --optimizer lion --optimizer.b1 0.8"
).split()

OWN = ("exp_name", "checkpoint_base_dir", "resume", "resume_from")


@pytest.fixture
def words(tmp_path):
    return ["--exp-name", "x", "--checkpoint-base-dir", str(tmp_path)]


def recorded(tmp_path, experiment, **start):
    """The files of a run that has started."""
    run = tmp_path / experiment.name / experiment.exp_name
    run.mkdir(parents=True)
    (run / "experiment.json").write_text(json.dumps(as_json(experiment)))
    (run / "environment.json").write_text(
        json.dumps({"starts": [{"argv": ["x"], "directory": str(tmp_path), **start}]})
    )
    return run


@pytest.fixture
def asked(monkeypatch):
    """The experiment that a command line would train, without starting it."""
    monkeypatch.chdir(Path.cwd())  # a run goes on in another folder: back here at the end
    found = []
    monkeypatch.setattr(train_verbs, "_run", lambda experiment, process: found.append(experiment) or 0)

    def ask(*words):
        assert cli.run([*map(str, words)]) == 0
        return found.pop()

    return ask


@pytest.mark.parametrize("words", [["debug", "--resume", "--exp-name", "x"], ["resume", "debug/x"]])
@pytest.mark.parametrize("file", ["experiment.json", "environment.json"])
def test_a_record_on_a_disk_that_fails_for_a_moment_is_read_again(asked, tmp_path, monkeypatch, words, file):
    begun = dataclasses.replace(registry.load("debug"), exp_name="x", checkpoint_base_dir=str(tmp_path), seed=7)
    recorded(tmp_path, begun)
    monkeypatch.chdir(tmp_path)
    left, pauses = [errno.EIO, errno.ESTALE], []

    def read(path):
        if path.name == file and left:
            raise OSError(left.pop(), "it fails", str(path))
        return read_json(path)

    monkeypatch.setattr(run_record, "read_json", read)
    monkeypatch.setattr(passing_errors.time, "sleep", pauses.append)
    assert asked(*words, *(["--checkpoint-base-dir", tmp_path] if words[0] == "debug" else [])).seed == 7
    assert pauses == ([] if words[0] == "debug" and file == "environment.json" else [1.0, 2.0])


def test_a_disk_that_fails_is_no_mistake_on_the_command_line(tmp_path, monkeypatch):
    def fail(argv):
        raise OSError(errno.ESTALE, "Stale file handle", "/runs/x/experiment.json")

    monkeypatch.setitem(cli.VERBS, "runs", fail)
    assert cli.run(["runs"]) == PEER_LOST


def test_resume_needs_none_of_the_flags_again(asked, words, tmp_path, caplog):
    begun = asked("debug", *words, *FLAGS)
    recorded(tmp_path, begun)
    with caplog.at_level(logging.INFO):
        again = asked("debug", *words, "--resume")
    assert again == dataclasses.replace(begun, resume=True, profile=0)
    assert "batch_size 4 (the experiment alone: 8)" in caplog.text and "optimizer.b1 0.8" in caplog.text


def test_flags_that_are_given_replace_what_is_recorded(asked, words, tmp_path, caplog):
    begun = asked("debug", *words, *FLAGS)
    recorded(tmp_path, begun)
    with caplog.at_level(logging.INFO):
        again = asked("debug", *words, "--resume", "--batch-size", "16", "--optimizer.b1=0.7", "--tensorboard")
    assert all(f"  {name} " not in caplog.text for name in ("batch_size", "optimizer.b1", "tensorboard"))
    assert "  seed 5 (the experiment alone: 42)" in caplog.text, "no flag says otherwise"
    assert (again.batch_size, again.optimizer.b1, again.tensorboard) == (16, 0.7, True)
    assert again.lr_schedule == begun.lr_schedule and again.model == begun.model
    everything = asked("debug", *words, "--resume", *FLAGS)
    assert everything == dataclasses.replace(begun, resume=True), "all of them typed again, as before"


def test_resume_from_reads_it_too_and_overwrite_does_not(asked, words, tmp_path):
    begun = asked("debug", *words, *FLAGS)
    run = recorded(tmp_path, begun)
    assert asked("debug", *words, "--resume-from", "20").model == begun.model
    (run / "20").mkdir()
    other = ["--exp-name", "y", "--checkpoint-base-dir", str(tmp_path)]
    for where in (run, run / "20"):
        new = asked("debug", *other, "--resume-from", where)
        assert (new.model, new.batch_size, new.exp_name) == (begun.model, 4, "y")
    assert asked("debug", *words, "--overwrite").model == debug.model
    assert asked("debug", *other, "--resume").model == debug.model, "there is no such run"
    # Another experiment begins at its checkpoint with its own values.
    tiny = asked("pi0_bridge_traj_tiny", *other, "--resume-from", run)
    assert tiny == dataclasses.replace(
        registry.load("pi0_bridge_traj_tiny"), **{name: getattr(tiny, name) for name in OWN}
    )


def test_the_run_of_a_file_goes_on_with_its_classes(asked, words, tmp_path, monkeypatch):
    file = tmp_path / "my_own_runs.py"
    file.write_text(
        "import dataclasses\n"
        "from openpi_train import registry\n"
        "from openpi_train.robots.bridge import Bridge\n"
        "@dataclasses.dataclass(frozen=True, kw_only=True)\n"
        "class OwnRobot(Bridge):\n"
        "    extra: int = 3\n"
        "_debug = registry.load('debug')\n"
        "_dataset = dataclasses.replace(_debug.data.datasets[0], robot=OwnRobot(extra=4))\n"
        "try7 = dataclasses.replace(_debug, data=dataclasses.replace(_debug.data, datasets=(_dataset,)))\n"
    )
    begun = asked(f"{file}:try7", *words, "--batch-size", "4")
    run = recorded(tmp_path, begun, argv=["openpi_train", "my_own_runs.py:try7"])
    assert asked(f"{file}:try7", *words, "--resume") == dataclasses.replace(begun, resume=True)
    again = asked("resume", run)  # from another folder, too: the file is found where the run was started
    assert again.batch_size == 4 and as_json(again.data) == as_json(begun.data)
    starts = json.loads((run / "environment.json").read_text())["starts"]
    starts.append({"argv": ["openpi_train", "resume", str(run)], "directory": str(tmp_path)})
    (run / "environment.json").write_text(json.dumps({"starts": starts}))
    for where in (run, run / "20", run / "20" / "params"):  # what eval, serve, report and convert of it read
        read = experiment_of_run(json.loads((run / "experiment.json").read_text()), where)
        assert read.demonstrations.datasets[0].robot.extra == 4  # pyright: ignore
    file.rename(tmp_path / "moved.py")
    with pytest.raises(CheckpointError, match=rf"is a OwnRobot.* was started with {file}:try7, which is not there"):
        experiment_of(ResumeRequest(run=run))
    moved = experiment_of(ResumeRequest(run=run, experiment=f"{tmp_path}/moved.py:try7"))
    assert moved.demonstrations.datasets[0].robot.extra == 4  # pyright: ignore


def test_the_verb_takes_the_run_and_what_is_given(asked, words, tmp_path, monkeypatch, caplog):
    begun = asked("debug", *words, *FLAGS)
    run = recorded(tmp_path, begun)
    monkeypatch.chdir(tmp_path)
    again = asked("resume", "debug/x", "--num-train-steps", "90", "--dry-run")
    assert again == dataclasses.replace(begun, resume=True, profile=0, num_train_steps=90)
    assert asked("resume", run, "--resume").resume, "a launcher that starts it again adds the flag"
    assert asked("resume", run, "--resume-from", "20").resume_from == "20"
    assert "relative paths" not in caplog.text


def test_a_run_goes_on_in_the_folder_where_it_was_started(asked, words, tmp_path, monkeypatch, caplog):
    (tmp_path / "elsewhere" / "data").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    begun = asked("debug", "--exp-name", "x", "--checkpoint-base-dir", ".")
    run = recorded(tmp_path, begun)
    monkeypatch.chdir(tmp_path / "elsewhere")
    with caplog.at_level(logging.INFO):
        again = asked("resume", "../debug/x", "--assets-base-dir", "./data")
    assert Path.cwd() == tmp_path and f"goes on in {tmp_path}" in caplog.text
    assert again.run_dir == run and again.checkpoint_base_dir == "."
    assert again.assets_base_dir == str(tmp_path / "elsewhere" / "data"), "what is given is of where it is typed"
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert asked("resume", run, "--assets-base-dir=./data").assets_base_dir == str(tmp_path / "elsewhere" / "data")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert asked("resume", run).assets_dir.absolute() == tmp_path / "assets" / "debug"


def test_where_the_folder_is_gone_relative_paths_are_told(asked, words, tmp_path, caplog):
    run = recorded(tmp_path, asked("debug", *words), directory=str(tmp_path / "gone"))
    with caplog.at_level(logging.WARNING):
        asked("resume", run)
    assert "which is not there; relative paths of its experiment, such as ./assets" in caplog.text


def test_what_is_no_run_is_told(words, tmp_path):
    run = recorded(tmp_path, dataclasses.replace(debug, name="debug", exp_name="x"))
    (run / "20").mkdir()
    with pytest.raises(UsageError, match=r"is a checkpoint: give its run, and --resume-from 20"):
        experiment_of(ResumeRequest(run=run / "20"))
    with pytest.raises(UsageError, match=r"is no run: there is no experiment\.json"):
        experiment_of(ResumeRequest(run=tmp_path))
    run.rename(tmp_path / "x")
    with pytest.raises(UsageError, match=r"is a run of debug, and lies in a folder"):
        experiment_of(ResumeRequest(run=tmp_path / "x"))


@pytest.mark.parametrize("content", ["{}", "[1, 2]", "3"])
def test_a_record_that_is_none_is_told(words, tmp_path, capsys, content):
    run = recorded(tmp_path, dataclasses.replace(debug, name="debug", exp_name="x"))
    (run / "experiment.json").write_text(content)
    for line in (["resume", str(run)], ["debug", *words, "--resume"]):
        assert cli.run(line) != 0
        assert "is no record of an experiment" in capsys.readouterr().err


def test_fields_that_are_gone_are_told_and_left_out(asked, words, tmp_path, caplog):
    begun = asked("debug", *words, *FLAGS)
    run = recorded(tmp_path, begun)
    value = json.loads((run / "experiment.json").read_text())
    value["use_magic"] = True
    value["data"]["shuffle_buffer"] = 7
    (run / "experiment.json").write_text(json.dumps(value))
    for line in (["debug", *words, "--resume"], ["resume", run]):
        caplog.clear()
        assert asked(*line).batch_size == 4
        assert "has not, which are left out" in caplog.text
        assert "use_magic True" in caplog.text and "data.shuffle_buffer 7" in caplog.text


def test_a_run_with_a_class_that_is_gone_goes_on_with_the_flags_alone(asked, words, tmp_path, caplog):
    begun = asked("debug", *words, *FLAGS)
    run = recorded(tmp_path, begun)
    value = json.loads((run / "experiment.json").read_text())
    value["lr_schedule"]["__class__"] = "OldSchedule"
    (run / "experiment.json").write_text(json.dumps(value))
    assert asked("debug", *words, "--resume", "--batch-size", "2").batch_size == 2
    assert re.search(r"flags that are given alone: experiment\.lr_schedule .*OldSchedule", caplog.text)


def test_a_name_of_several_experiments_finds_its_run_without_the_dataset(asked, words, tmp_path):
    (several,) = [name for name in ("robot_dp_tiny",) if name in registry.entries()]
    begun = dataclasses.replace(
        registry.load(registry.alternatives(several)[1]), exp_name="x", batch_size=2, checkpoint_base_dir=str(tmp_path)
    )
    recorded(tmp_path, begun)
    again = asked(several, *words, "--resume")
    assert again == dataclasses.replace(begun, resume=True)


@pytest.mark.parametrize("door", ["posttrain", "vla"])
def test_a_run_of_another_tools_config_goes_on_without_the_config(asked, tmp_path, monkeypatch, door):
    monkeypatch.chdir(tmp_path)
    if door == "posttrain":
        write_project(tmp_path)
        begun = asked("posttrain", "--config", "config.yaml", "--algorithm", "sft", "--batch-size", "6", "--seed", "3")
    else:
        write_vla_project(tmp_path)
        begun = asked("vla", "--config", "configs/vla_config.yaml", "--batch-size", "6", "--seed", "3")
    run = recorded(
        Path(begun.checkpoint_base_dir).absolute(), begun, argv=["openpi_train", door], directory=str(tmp_path)
    )
    again = asked("resume", run)
    assert again == dataclasses.replace(begun, resume=True) and (again.batch_size, again.seed) == (6, 3)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["train", "a.py:one", "--exp-name", "x"], "a.py:one"),
        (["resume", "runs/one/x", "--experiment", "b.py:one"], "b.py:one"),
        (["vla", "--experiment=b.py:one", "--config", "c.yaml"], "b.py:one"),
        (["lm_grpo", "--reward", "short.py:is_short"], None),
        (["debug"], None),
    ],
)
def test_the_file_of_a_run_is_that_of_its_command_line(tmp_path, words, found):
    run = recorded(tmp_path, dataclasses.replace(debug, exp_name="x"), argv=["openpi_train", *words])
    assert run_record.own_experiment(run) == (None if found is None else str(tmp_path / found))
    assert run_record.own_experiment(tmp_path) is None, "there is no run"
