import json
import time

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from openpi_train.runtime import selftest
from openpi_train.runtime.exits import PEER_LOST, NumbersError


def test_all_devices_are_summed_over_and_timed():
    found = selftest.measure()
    assert found is not None
    assert (found.devices, found.hosts, found.size_bytes) == (jax.device_count(), 1, 4 * 2**20)
    assert 0 < found.latency_s < found.first_s and found.transfer_s > 0
    assert f"collectives over {jax.device_count()} devices on 1 host: latency" in found.line()
    assert json.loads(json.dumps(found.as_json()))["latency_s"] == found.latency_s


def test_one_device_has_nobody_to_add_to(monkeypatch):
    monkeypatch.setattr(selftest.jax, "devices", lambda: jax.local_devices()[:1])
    assert selftest.measure() is None


def test_a_wrong_sum_is_told_with_its_device():
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("all",), axis_types=(AxisType.Auto,))
    # Replicated in name only: the second device holds other numbers, as after a broken link.
    shards = [
        jax.device_put(np.full(2, value, np.float32), device)
        for value, device in zip((3, 4), mesh.devices, strict=True)
    ]
    total = jax.make_array_from_single_device_arrays((2,), NamedSharding(mesh, PartitionSpec()), shards)
    with pytest.raises(NumbersError, match=r"2 devices do not add up.* has \[4.0\] where 1 \+ ... \+ 2 = 3"):
        selftest._check(total, 2)


@pytest.mark.multiprocess
def test_processes_measure_together(run_processes):
    code = """
    from openpi_train.runtime import selftest
    print(selftest.measure().line())
    """
    for result in run_processes(code, 2, devices=2):
        assert result.returncode == 0, result.stderr
        assert "collectives over 4 devices on 1 host" in result.stdout


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_collective_that_hangs_is_named_and_ends_the_process_in_time(run_processes):
    code = """
    from openpi_train.runtime import selftest
    if world.process_index == 1:  # it comes, and then takes no part
        agree.gather("collective self-test", "host-1")
        time.sleep(60)
    begin = time.monotonic()
    selftest.measure(timeout_s=13.0)
    """
    begin = time.monotonic()
    zero, _ = run_processes(code, 2, devices=2)
    assert zero.returncode == PEER_LOST, zero.stderr
    assert "collective self-test over 4 devices on 2 hosts since 1" in zero.stderr
    assert "no answer within 13 s from 4 devices on 2 hosts" in zero.stderr
    assert "openpi_train doctor" in zero.stderr
    assert time.monotonic() - begin < 60
