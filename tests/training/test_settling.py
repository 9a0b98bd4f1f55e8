"""One settling is read by every door: what a start would do is what a dry run, a plan and a compilation describe."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import jax
import pytest
import small_runs

from openpi_train.experiment import Experiment
from openpi_train.optim import LRSchedule
from openpi_train.planning.forecast import Forecast
from openpi_train.runtime.exits import UsageError
from openpi_train.runtime.world import WorldFlags, find_world
from openpi_train.tools import check_run, compiled_memory, gpu_programs, plan
from openpi_train.training import settling
from openpi_train.training.settling import Prepared, Settling, open_if_ready, require_early, settle

WORLD = find_world(WorldFlags(), {})


@pytest.fixture
def given(tmp_path) -> Experiment:
    """So many rows, and such a rate, for each of the devices."""
    per_device = {"keep_effective_batch_size": False, "lr_scaling": "linear", "reference_batch_size": 2}
    schedule = LRSchedule(warmup_steps=1, peak_lr=1e-3)
    return dataclasses.replace(
        small_runs.small,
        name="small",
        exp_name="x",
        checkpoint_base_dir=str(tmp_path),
        assets_base_dir=str(tmp_path / "assets"),
        batch_size=2,
        lr_schedule=schedule,
        **per_device,
    )


def told(forecast: Forecast) -> dict[str, object]:
    """What a forecast says; micro-batches that nobody asked for are a plan's alone."""
    found = forecast.as_json()
    return {name: found[name] for name in ("strategy", "fsdp_devices", "remat", "grad_accum", "bytes_per_device")}


def rows_and_rate(experiment: Experiment) -> tuple[int, float]:
    return experiment.batch_size, experiment.lr_schedule.peak_lr


def test_every_door_describes_the_run_that_a_start_takes(given):
    start = settle(given, WORLD)
    rows, rate = rows_and_rate(start.prepared.experiment)
    count = jax.device_count()
    assert rows == 2 * count and rate == pytest.approx(1e-3 * count)
    planned = plan.make_report(given, start.machine)
    assert planned.recommended is not None
    compiled = gpu_programs.Training.of(given, start.machine, jax.devices(), ())
    on_cpus = compiled_memory.prepared_for_cpus(planned.experiment, planned.recommended)
    rehearsed = Settling.here(given, WORLD, open_if_ready).prepared
    doors = {"dry run": rehearsed, "compile": compiled, "plan": on_cpus}
    assert {name: told(one.forecast) for name, one in doors.items()} == dict.fromkeys(doors, told(start.chosen))
    assert told(planned.recommended) == told(start.chosen)
    assert not [one.text for one in check_run.needs(given, WORLD) if one.level == "fail"]
    of_doors = {name: rows_and_rate(one.experiment) for name, one in doors.items()}
    assert of_doors == dict.fromkeys(doors, (rows, rate))


def noting(one: Callable[..., Any], name: str, made: list[str]) -> Callable[..., Any]:
    def noted(*args: Any, **named: Any) -> Any:
        made.append(name)
        return one(*args, **named)

    return noted


def test_each_stage_is_made_once_and_only_when_it_is_asked_for(given, monkeypatch):
    made: list[str] = []
    for name in ("whole_layout", "forecasts", "with_checked_attention"):
        one = getattr(settling, name)
        monkeypatch.setattr(settling, name, noting(one, name, made))
    ahead_of_devices = Settling.ahead(given, 4)
    assert ahead_of_devices.fitted.batch_size == 8 and require_early(given, 4)
    assert not made
    start = settle(given, WORLD)
    assert isinstance(start.prepared, Prepared) and start.prepared is start.prepared
    assert sorted(made) == ["forecasts", "whole_layout", "with_checked_attention"]


def test_a_run_that_resume_does_not_find_is_told_with_what_else_is_wrong(given, tmp_path, caplog):
    run = tmp_path / given.name / "so101"
    run.mkdir(parents=True)
    (run / "experiment.json").write_text("{}")
    for name, problem in (("so1O1", True), ("so1O1", False), ("so101x9", True)):
        caplog.clear()
        asked = dataclasses.replace(given, checkpoint_base_dir=str(tmp_path), exp_name=name, resume=name == "so1O1")
        with contextlib.suppress(UsageError), caplog.at_level(logging.INFO):
            require_early(dataclasses.replace(asked, save_interval=0 if problem else 1))
        said = f"Did you mean so101? It goes on with: python -m openpi_train resume {run}"
        assert (said in caplog.text) == (asked.resume and problem), "without another problem `check_run` says it"
