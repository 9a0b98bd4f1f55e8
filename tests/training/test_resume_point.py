"""The checkpoint that `--resume-from` names, and what is said where there is none."""

import dataclasses
import json

import pytest
from openpi_train_configs.debug import debug

from openpi_train.fields import as_json
from openpi_train.runtime.exits import UsageError
from openpi_train.tools.requests import ResumeRequest
from openpi_train.tools.resume_run import experiment_of
from openpi_train.training.resume_point import ResumePoint, resume_point
from openpi_train.training.rundir import check_run


def write_checkpoints(run, *steps, best=None):
    """A run's directory with complete checkpoints, and one of step 9 that is not."""
    for step in (*steps, 9):
        (run / str(step)).mkdir(parents=True)
        if step != 9:
            (run / str(step) / "manifest.json").write_text("{}")
    (run / "experiment.json").write_text("{}")
    if best is not None:
        (run / "best.json").write_text(json.dumps({"step": best, "value": 0.5}))
        (run / "best").symlink_to(str(best))
    return run


@pytest.fixture
def runs(tmp_path):
    """The directory of `debug`'s runs: `x`, of which step 4 is the best, and `other`."""
    write_checkpoints(tmp_path / "debug" / "x", 2, 4, 6, best=4)
    write_checkpoints(tmp_path / "debug" / "other", 3, 5)
    return tmp_path / "debug"


def given(runs, word, exp_name="x"):
    base = str(runs.parent)
    return dataclasses.replace(debug, name="debug", exp_name=exp_name, checkpoint_base_dir=base, resume_from=word)


def test_it_includes_resume_and_without_it_the_newest_is_meant(runs):
    assert given(runs, "4").resume and not given(runs, None).resume
    assert resume_point(given(runs, None)) == ResumePoint()


@pytest.mark.parametrize(("word", "step"), [("2", 2), ("latest", 6), ("best", 4)])
def test_a_step_the_newest_and_the_best_are_the_runs_own(runs, word, step):
    assert resume_point(given(runs, word)) == ResumePoint(step=step)


def test_a_path_is_another_runs_checkpoint_its_newest_or_the_runs_own(runs):
    others = runs / "other"
    assert resume_point(given(runs, str(others / "3"))) == ResumePoint(other=str(others / "3"))
    assert resume_point(given(runs, str(others))) == ResumePoint(other=str(others / "5"))
    assert resume_point(given(runs, str(runs / "x" / "best"))) == ResumePoint(step=4)
    assert resume_point(given(runs, str(runs / "x" / "best"), "new")) == ResumePoint(other=str(runs / "x" / "4"))


def test_a_restart_of_a_run_that_began_elsewhere_does_not_need_that_place_any_more(runs):
    experiment = given(runs, str(runs / "gone"))
    with pytest.raises(UsageError, match="has no such checkpoint"):
        resume_point(experiment)
    (runs / "x" / "experiment.json").write_text(json.dumps(as_json(experiment)))
    assert resume_point(experiment) == ResumePoint(other=str(runs / "gone"))


def test_a_start_that_is_recorded_without_a_checkpoint_has_not_begun(runs):
    """A run that was killed before its first save has not read what it should begin from, or would begin again."""
    word = str(runs / "gone")
    for steps in ((), (9,)):  # none, and one that is not complete
        run = runs / f"killed{len(steps)}"
        for step in steps:
            (run / str(step)).mkdir(parents=True)
        run.mkdir(exist_ok=True)
        (run / "experiment.json").write_text(json.dumps({"resume_from": word}))
        with pytest.raises(UsageError, match=r"killed. has no such checkpoint; there is no complete checkpoint"):
            resume_point(given(runs, word, run.name))
        other = str(runs / "other" / "3")  # what is there is begun from again
        (run / "experiment.json").write_text(json.dumps({"resume_from": other}))
        assert resume_point(given(runs, other, run.name)) == ResumePoint(other=other)
        (run / "experiment.json").write_text(json.dumps({"resume_from": str(runs / "other")}))
        newest = ResumePoint(other=str(runs / "other" / "5"))
        assert resume_point(given(runs, str(runs / "other"), run.name)) == newest


def test_another_start_than_the_recorded_one_is_no_restart(runs):
    (runs / "x" / "experiment.json").write_text(json.dumps({"resume_from": str(runs / "gone")}))
    with pytest.raises(UsageError, match="has no such checkpoint"):
        resume_point(given(runs, str(runs / "gone" / "2")))
    for damaged in ("", "[", "{}"):
        (runs / "x" / "experiment.json").write_text(damaged)
        with pytest.raises(UsageError, match="has no such checkpoint"):
            resume_point(given(runs, str(runs / "gone")))


def test_what_is_not_there_is_told_with_the_steps_that_are(runs):
    for word in ("5", "9", "lates"):
        with pytest.raises(UsageError) as error:
            check_run(given(runs, word))
        said = f"--resume-from {word}: {runs / 'x'} has no such checkpoint; "
        assert str(error.value).startswith(f"{said}there are steps 2, 4, 6, of which 4 is the best")
    with pytest.raises(UsageError, match="there is no complete checkpoint"):
        resume_point(given(runs, "latest", "new"))
    with pytest.raises(UsageError, match="there are steps 3, 5"):
        resume_point(given(runs, "best", "other"))
    with pytest.raises(UsageError, match=r"neither a complete checkpoint .* nor a run with one"):
        resume_point(given(runs, str(runs / "other" / "9")))


@pytest.mark.parametrize("state", [True, False])
def test_a_checkpoint_of_openpis_is_recognised_wherever_it_is_given(runs, state):
    """By openpi's layout: <step>/params/_METADATA, and train_state beside it unless it was published."""
    for step in ("5", "10"):
        for item in ("params", "train_state") if state else ("params",):
            (runs / "theirs" / step / item).mkdir(parents=True)
            (runs / "theirs" / step / item / "_METADATA").touch()
    asked = [
        lambda: resume_point(given(runs, str(runs / "theirs"), "new")),
        lambda: resume_point(given(runs, str(runs / "theirs" / "10"), "new")),
        lambda: check_run(dataclasses.replace(given(runs, None, "theirs"), resume=True)),
        lambda: check_run(dataclasses.replace(given(runs, None, "theirs"), overwrite=True)),
        lambda: experiment_of(ResumeRequest(run=runs / "theirs")),
        lambda: experiment_of(ResumeRequest(run=runs / "theirs" / "10")),
    ]
    for ask in asked:
        with pytest.raises(UsageError, match="is a checkpoint in the form openpi") as error:
            ask()
        assert f"--weight-loader.params-path {runs / 'theirs' / '10'}" in str(error.value)
        assert ("--weight-loader.continue-training" in str(error.value)) == state


def test_a_path_that_is_not_there_is_said_first(runs, monkeypatch):
    monkeypatch.chdir(runs)
    for word in ("old/best_model.pth", str(runs / "old" / "best_model.pth")):
        with pytest.raises(UsageError) as error:
            resume_point(given(runs, word, "new"))
        assert str(error.value).startswith(f"--resume-from {word}: there is no {runs / 'old' / 'best_model.pth'}, and ")
