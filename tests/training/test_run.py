"""What a run tells the launcher that watches over it."""

import dataclasses
import inspect
import types

import pytest
from openpi_train_configs.debug import debug

from openpi_train.launch import status
from openpi_train.launch.status import Status
from openpi_train.runtime.exits import UsageError
from openpi_train.training.run import Run
from openpi_train.training.slow_hosts import SlowDevices, SlowHosts

# Without the run-time type check: they are given no real run.
log, save, save_locally, finish = map(inspect.unwrap, (Run.log, Run.save, Run.save_locally, Run.finish))


def test_a_save_is_told_to_the_launcher_whichever_disk_it_goes_to(tmp_path, monkeypatch):
    file = tmp_path / "status.json"
    monkeypatch.setenv(status.VARIABLE, str(file))
    saving = types.SimpleNamespace(save=lambda state, **_: 0.5, save_locally=lambda state, **_: 0.5)
    saving.finish_former = lambda: False
    local = types.SimpleNamespace(local_checkpoints=types.SimpleNamespace(dir="/local"))
    data = types.SimpleNamespace(norm_stats_json=dict, token_files={})
    run = types.SimpleNamespace(checkpoints=saving, data=data, _saved_with=dict, directory="/runs/x", experiment=local)
    run.metrics, run._account = types.SimpleNamespace(log=lambda step, values: None), lambda step: None
    run._is_careful, run.feed = lambda: False, types.SimpleNamespace()
    save(run, 30, None)
    assert status.read(file) == Status(saved_step=30)
    save_locally(run, 33, None)
    assert status.read(file) == Status(saved_step=33)


def test_a_warning_of_the_objective_is_logged_once(caplog):
    objective = types.SimpleNamespace(warnings=lambda metrics: ["it falls"] if metrics["x"] > 1 else [])
    run = types.SimpleNamespace(trainer=types.SimpleNamespace(objective=objective), warned=set())
    run.goodput, run.slow_hosts, run.device_speed, run.slow_devices = None, SlowHosts(), None, SlowDevices()
    run.feed = types.SimpleNamespace(proportions=dict, metrics=dict, tune=lambda **_: None)
    run.metrics = types.SimpleNamespace(log=lambda step, values: None)
    run.progress = types.SimpleNamespace(report=lambda values: None)
    times = {"time/step_s": 0.1, "data/wait_s": 0.0}
    for step, value in ((10, 0.5), (20, 2.0), (30, 3.0)):
        log(run, step, {"x": value, **times})
    assert [record.message for record in caplog.records] == ["step 20: it falls"]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"batch_size": 12}, 6),
        ({"batch_size": 16, "micro_batch_size": 8}, 6),
        ({"batch_size": 12, "log_interval": 0}, 2),
        ({"batch_size": 12, "resume": True, "overwrite": True}, 2),
    ],
)
def test_a_batch_that_does_not_divide_over_the_devices_has_an_exit_code_of_its_own(changes, code):
    """Only where nothing else is wrong: then fewer devices may do."""
    with pytest.raises(UsageError) as refused:
        dataclasses.replace(debug, exp_name="x", **changes).check(8)
    assert refused.value.exit_code == code


def test_time_ends_with_the_last_step_and_goes_on_after_a_stop(tmp_path):
    told = []
    goodput = types.SimpleNamespace(write=lambda step, *, is_end: told.append((step, is_end)), words=str)
    (tmp_path / "results.json").touch()
    for step in (5, 10):
        run = types.SimpleNamespace(close=lambda: None, directory=tmp_path, goodput=goodput, step=step)
        run.feed, run.experiment = types.SimpleNamespace(bad_records=0), types.SimpleNamespace(num_train_steps=10)
        finish(run, keep_results=True)
    assert told == [(5, False), (10, True)]
