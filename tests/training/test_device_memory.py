"""What a run says of its devices' memory, on the progress line and in its metrics."""

import types

import jax
import pytest

from openpi_train.training.device_memory import fullest_device
from openpi_train.training.progress_report import ProgressReport
from openpi_train.training.run import Run
from openpi_train.training.slow_hosts import SlowDevices, SlowHosts


def device(peak, now, limit=80):
    stats = {"peak_bytes_in_use": peak, "bytes_in_use": now, "bytes_limit": limit}
    sizes = {name: int(size * 2**30) for name, size in stats.items() if size is not None}
    return types.SimpleNamespace(memory_stats=lambda: sizes)


@pytest.fixture
def devices(monkeypatch):
    """A function that says which devices this process has."""
    return lambda *found: monkeypatch.setattr(jax, "local_devices", lambda: list(found))


def test_memory_is_that_of_the_fullest_device(devices):
    devices(device(10, 9), device(20, 5.5))
    memory = fullest_device()
    assert memory is not None and memory.line() == "device memory 20.0/80.0 GiB"
    assert memory.metrics() == {"device/memory_gib": 5.5, "device/memory_peak_gib": 20.0}
    assert ProgressReport(10).report({}).endswith("| device memory 20.0/80.0 GiB")
    devices(device(20, 5.5, limit=None))
    memory = fullest_device()
    assert memory is not None and memory.line() == "device memory 20.0 GiB"


def test_a_platform_that_does_not_report_it_has_no_such_metrics(devices):
    devices(types.SimpleNamespace(memory_stats=lambda: None))
    assert fullest_device() is None
    assert "memory" not in ProgressReport(10).report({})


def test_every_line_of_metrics_has_the_memory(devices):
    devices(device(2, 1))
    run, lines = object.__new__(Run), []
    run.slow_hosts, run.slow_devices, run.device_speed = SlowHosts(), SlowDevices(), None
    run.feed = types.SimpleNamespace(proportions=dict, metrics=dict, tune=lambda **_: None)
    run.metrics = types.SimpleNamespace(log=lambda step, values: lines.append((step, values)))
    run.progress = ProgressReport(10)
    run.trainer = types.SimpleNamespace(objective=types.SimpleNamespace(warnings=lambda values: []))
    values = {"loss": 1.0, "time/step_s": 0.1, "data/wait_s": 0.0}
    run.log(3, values)
    assert lines == [(3, {**values, "device/memory_gib": 1.0, "device/memory_peak_gib": 2.0})]
