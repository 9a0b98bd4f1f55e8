"""The timed product that tells how fast a device computes."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from openpi_train.runtime import step_times
from openpi_train.runtime.step_times import StepTimes
from openpi_train.training import device_speed
from openpi_train.training.device_speed import DeviceSpeed


@pytest.fixture
def small(monkeypatch):
    """Products that a CPU computes at once, and totals of no other test."""
    monkeypatch.setattr(device_speed, "SIZE", 16)
    monkeypatch.setattr(device_speed, "num_products", lambda kind: 3)
    monkeypatch.setattr(device_speed, "gpu_state", lambda gpu: f"GPU {gpu} is well")
    monkeypatch.setattr(step_times, "_own", StepTimes())


def test_all_devices_are_timed_once_a_minute_within_the_mesh_of_a_run(small, monkeypatch):
    now = [100.0]
    devices = jax.local_devices()
    speed = DeviceSpeed(devices, lambda: now[0])
    told = []
    with jax.set_mesh(Mesh(np.asarray(devices), ("replica",))), jax.transfer_guard("disallow"):
        for now[0] in (100.0, 159.0, 160.5):
            assert speed.look() is (now[0] != 159.0)
            told.append(step_times.own())
    assert [times.products for times in told] == [1, 1, 2] and told[0].product_s == told[1].product_s
    assert len(told[2].product_s) == len(devices) and all(0 < each < 10 for each in told[2].product_s)
    speed._reading.join()
    assert step_times.own().device.endswith("is well") and step_times.own().products == 2


def test_a_chain_of_products_neither_overflows_nor_vanishes(small, monkeypatch):
    monkeypatch.setattr(device_speed, "SIZE", 64)
    (result,) = np.asarray(device_speed._compiled(jax.local_devices()[:1], 110)())  # as many as on an H200
    assert 1e-6 < abs(float(result)) < 1e6


def test_products_take_a_thousandth_of_the_time_at_most_and_are_not_timed_on_cpus():
    # Dense bfloat16 peak of NVIDIA's data sheets: H100 SXM 989.4, A100 312 TFLOP/s.
    for kind, peak in (("NVIDIA H100 80GB HBM3", 989.4e12), ("NVIDIA A100-SXM4-80GB", 312e12)):
        at_half_peak_s = device_speed.num_products(kind) * 2 * device_speed.SIZE**3 / (peak / 2)
        assert 0.01 < at_half_peak_s < device_speed.EVERY_S / 1000
    assert device_speed.num_products("cpu") is None
    assert not DeviceSpeed(jax.local_devices()).look()


def test_a_device_whose_memory_is_full_is_not_timed_any_more(small, monkeypatch, caplog):
    speed = DeviceSpeed(jax.local_devices(), lambda: len(caplog.records) * 100.0)

    def fail(products):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 33554432 bytes.")

    monkeypatch.setattr(device_speed, "timed", fail)
    with caplog.at_level("INFO"):
        speed.look()
        speed.look()
    assert [record.message for record in caplog.records] == [
        "the speed of the devices is not measured: their memory is full"
    ]
    assert step_times.own().products == 0
