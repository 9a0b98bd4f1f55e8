"""Which checkpoint is the best, and what the log and the results say of a better evaluation that was not saved."""

import contextlib
import dataclasses
import json
import logging
import math
import types

import jax
import pytest
from checkpoint_process import SAVED_WITH, make_state
from openpi_train_configs.debug import debug

from openpi_train.checkpoints.best import Best, lowest_loss
from openpi_train.checkpoints.checkpoint_store import Checkpoints
from openpi_train.checkpoints.step_dirs import StepDirs
from openpi_train.parallel.mesh import make_mesh
from openpi_train.parallel.strategy import Plan
from openpi_train.runtime.exits import StorageError
from openpi_train.training.crash_loop import CrashLoop
from openpi_train.training.metrics import JsonLines, read_evaluations
from openpi_train.training.results import write_results
from openpi_train.training.run import Run

NAN = math.nan


def evaluations(**losses):
    """Lines of `s<step>=loss`, or of a pair, the second of the average."""
    pairs = {int(name[1:]): loss if isinstance(loss, tuple) else (loss,) for name, loss in losses.items()}
    names = ("val/loss", "val/loss_ema")
    return [{"step": step, **dict(zip(names, pair, strict=False))} for step, pair in pairs.items()]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (evaluations(s0=0.9, s2=0.3, s4=0.5), Best(step=2, value=0.3)),
        (evaluations(s0=0.9, s2=0.3, s4=0.3), Best(step=2, value=0.3)),
        (evaluations(s0=NAN, s2=-math.inf, s4=0.5), Best(step=4, value=0.5)),
        (evaluations(s0=(0.1, 0.9), s2=(0.2, 0.4), s4=(0.3, 0.8)), Best(step=2, value=0.4)),
        ([{"step": 2, "success/all": 0.5}, *evaluations(s4=0.5)], Best(step=4, value=0.5)),
        (evaluations(s0=NAN), None),
        ([], None),
    ],
    ids=["lowest", "first of equal", "no NaN", "of the average", "held-out rows", "all NaN", "none"],
)
def test_the_lowest_loss_is_the_first_of_the_finite_ones(lines, expected):
    assert lowest_loss(lines) == expected


def run_of(directory, caplog, *, save_interval, interval, steps=8, save_best=False):
    """A run that evaluates and saves as the loop does, of which nothing is computed; and what it can be told."""
    run = object.__new__(Run)
    run.experiment = dataclasses.replace(
        debug,
        save_interval=save_interval,
        num_train_steps=steps,
        save_best=save_best,
        eval=dataclasses.replace(debug.eval, interval=interval),
    )
    run.recorded = run.experiment
    run.directory, run.history, run.checkpoints = directory, [], Checkpoints(directory)
    run.data = types.SimpleNamespace(norm_stats_json=dict, token_files={}, tokenizer=None, text_length=None)
    run.metrics = types.SimpleNamespace(log=lambda step, values: None, wandb_id=None, unwritten=list)
    run.feed = types.SimpleNamespace(position=dict, can_be_saved=True)
    run.recorder = types.SimpleNamespace(unread=dict)
    run.crash_loop, run.failed_saves = CrashLoop(), 0
    caplog.set_level(logging.INFO, logger="openpi_train.training.run")
    return run


def go(run, losses):
    """Take the run through the steps; `losses` are those of the evaluated ones."""
    for step in range(run.experiment.num_train_steps + 1):
        state = make_state(step)
        if run.evaluation_is_due(step):
            run.evaluator = lambda state, step=step: {"val/loss": losses[step]}
            assert run.evaluate(step, state)
        if step and run.save_is_due(step):
            run.save(step, state)
    run.checkpoints.wait()
    run._tell_best()
    run.checkpoints.close()


def test_the_last_save_is_tried_whatever_became_of_those_before(tmp_path, caplog):
    run = run_of(tmp_path, caplog, save_interval=2, interval=100)

    def fail():
        raise StorageError("saving checkpoint 2 failed")

    run.failed_saves, run.checkpoints.finish_former = 2, fail
    with pytest.raises(StorageError, match="checkpoint 2 failed"):
        run.save(4, make_state(4))
    assert run.save(4, make_state(4), is_last=True)
    run.checkpoints.wait()
    assert run.checkpoints.step_dir(4).exists()
    run.checkpoints.close()


def said(caplog):
    return [record.getMessage() for record in caplog.records if "lowest held-out loss" in record.getMessage()]


def test_an_evaluation_between_saves_that_is_the_best_is_told_with_what_to_set(tmp_path, caplog):
    run = run_of(tmp_path, caplog, save_interval=4, interval=2)
    go(run, {0: 0.9, 2: 0.5, 4: 0.6, 6: 0.3, 8: 0.4})
    advice = " (--save-best saves such a step; every evaluated step is saved if --save-interval, 4, divides "
    advice += "--eval.interval, 2)"
    assert said(caplog) == [
        f"step 2 has the lowest held-out loss so far and is not saved{advice}",
        f"step 6 has the lowest held-out loss so far and is not saved{advice}",
        f"the lowest held-out loss, 0.3000, was that of step 6, of which there is no checkpoint{advice}; "
        "`best` is step 8 with 0.4000",
    ]
    assert run.checkpoints.best == Best(step=8, value=0.4)


@pytest.mark.slow
@pytest.mark.parametrize("save_interval", [1, 2])
def test_where_every_evaluated_step_is_saved_the_lowest_is_the_best_and_nothing_is_told(
    tmp_path, caplog, save_interval
):
    run = run_of(tmp_path, caplog, save_interval=save_interval, interval=2)
    go(run, {0: 0.9, 2: 0.5, 4: NAN, 6: 0.3, 8: 0.3})
    assert said(caplog) == []
    assert run.checkpoints.best == Best(step=6, value=0.3)
    assert (tmp_path / "best").resolve() == tmp_path / "6"


def test_with_save_best_an_evaluation_that_is_the_best_so_far_is_saved(tmp_path, caplog):
    run = run_of(tmp_path, caplog, save_interval=100, interval=2, save_best=True)
    go(run, {0: 0.9, 2: 0.5, 4: 0.6, 6: 0.3, 8: 0.4})
    assert said(caplog) == []
    assert run.checkpoints.best == Best(step=6, value=0.3) and run.checkpoints.steps() == [6, 8]
    assert not run.save_is_due(4) and run.save_is_due(6)
    run.feed.can_be_saved = False
    assert not run.save_is_due(6)


def test_the_newest_is_the_latest_and_what_is_after_a_step_that_is_gone_back_to_is_set_aside(tmp_path):
    dirs = StepDirs(tmp_path, keep_last=9, keep_period=None)
    for step, loss in [(1, 0.5), (2, 0.25), (3, 0.1)]:
        (tmp_path / str(step)).mkdir()
        (tmp_path / str(step) / "manifest.json").write_text("{}")
        dirs.note_metric(step, loss)
        dirs.note_complete(step)
        assert (tmp_path / "latest").resolve() == tmp_path / str(step)
    (tmp_path / "4").mkdir()  # a save that was interrupted
    dirs.leave_after(2)
    assert dirs.committed() == [1, 2] and len(list(tmp_path.glob("[34].replaced-*"))) == 2
    assert (tmp_path / "latest").resolve() == tmp_path / "2"
    assert dirs.best is None and not (tmp_path / "best").is_symlink()
    for step, loss in [(1, 0.5), (2, 0.25)]:
        dirs.note_metric(step, loss)
    assert dirs.best == Best(step=2, value=0.25)
    dirs.leave_after(2)
    assert dirs.best == Best(step=2, value=0.25)


def test_a_run_that_never_got_better_than_its_first_weights_is_told_so(tmp_path, caplog):
    run = run_of(tmp_path, caplog, save_interval=2, interval=2, steps=2)
    go(run, {0: 0.1, 2: 0.5})
    (line,) = said(caplog)
    assert line.endswith("0.1000, was that of the weights that the run began with; `best` is step 2 with 0.5000")


@pytest.mark.parametrize(("step", "level"), [(1, "INFO"), (2, "WARNING")])
def test_a_run_that_was_stopped_early_is_not_warned_of_its_first_weights(tmp_path, caplog, step, level):
    run = run_of(tmp_path, caplog, save_interval=2, interval=2, steps=2)
    run.step = step
    go(run, {0: 0.1, 2: 0.5})
    assert [record.levelname for record in caplog.records if "lowest held-out" in record.getMessage()] == [level]


def test_a_step_that_was_saved_by_a_stop_and_evaluated_after_it_competes(tmp_path, caplog):
    run = run_of(tmp_path, caplog, save_interval=4, interval=2)
    run.checkpoints.save(make_state(2), **SAVED_WITH)
    run.checkpoints.wait()
    run.evaluator = lambda state: {"val/loss": 0.5, "val/loss_ema": 0.25}
    run.evaluate(2, make_state(2))
    assert said(caplog) == [] and run.checkpoints.best == Best(step=2, value=0.25)  # the average's
    run.checkpoints.close()


def test_results_tell_the_lowest_loss_beside_the_best_checkpoint_and_nan_is_no_obstacle(tmp_path):
    lines = evaluations(s0=0.9, s2=0.3, s4=(NAN, math.inf))
    nothing = {"last_metrics": {}, "proportions": {}, "bad_records": 0, "seconds": 1.0, "checkpoints": [4]}
    plan = Plan(mesh=make_mesh(1, jax.devices()[:1]), strategy="zero2")
    best = Best(step=4, value=0.5)
    write_results(tmp_path / "results.json", debug, plan, step=4, evaluations=lines, best=best, **nothing)
    results = json.loads((tmp_path / "results.json").read_text())
    assert (results["summary"]["best_step"], results["summary"]["lowest_loss_step"]) == (4, 2)
    told = results["training_metrics"]["evaluations"]
    assert told == [*lines[:2], {"step": 4, "val/loss": "NaN", "val/loss_ema": "Infinity"}]


def test_a_resumed_run_reads_its_evaluations_as_numbers(tmp_path):
    with contextlib.closing(JsonLines(tmp_path / "metrics.jsonl")) as file:
        file.log(2, {"val/loss": NAN, "loss": 1.0})
        file.log(4, {"val/loss": 0.5, "val/loss_ema": math.inf})
    first, second = read_evaluations(tmp_path / "metrics.jsonl", 4)
    assert first["step"] == 2 and math.isnan(first["val/loss"])
    assert second == {"step": 4, "val/loss": 0.5, "val/loss_ema": math.inf}


def test_of_equal_losses_the_earlier_checkpoint_stays_the_best(tmp_path):
    dirs = StepDirs(tmp_path, keep_last=2, keep_period=None)
    for step, loss in [(1, 0.5), (2, 0.5), (3, 0.25)]:
        (tmp_path / str(step)).mkdir()
        (tmp_path / str(step) / "manifest.json").write_text("{}")
        dirs.note_metric(step, loss)
        dirs.note_complete(step)
        assert dirs.best == (Best(step=1, value=0.5) if step < 3 else Best(step=3, value=0.25))
