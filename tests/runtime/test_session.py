import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time

import jax
import pytest

from openpi_train.runtime.exits import HardwareError, UsageError
from openpi_train.runtime.session import share_of_gpus, software
from openpi_train.runtime.world import World

SUM_OVER_DEVICES = """
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(AxisType.Auto,))
rows = np.random.default_rng(0).normal(size=(jax.device_count(), 1000)).astype(np.float32)
array = jax.make_array_from_callback(rows.shape, NamedSharding(mesh, PartitionSpec("x")), lambda index: rows[index])
total = jax.jit(lambda rows: rows.sum(0), out_shardings=NamedSharding(mesh, PartitionSpec()))(array)
print(json.dumps([jax.device_count(), len(jax.local_devices()), np.asarray(total).tobytes().hex()]))
"""


@pytest.mark.multiprocess
def test_a_sum_over_four_devices_is_the_same_bits_on_1_2_and_4_processes(run_processes):
    totals = set()
    for process_count in (1, 2, 4):
        results = run_processes(SUM_OVER_DEVICES, process_count, devices=4 // process_count)
        assert [result.returncode for result in results] == [0] * process_count, results
        for result in results:
            count, local_count, total = json.loads(result.stdout.splitlines()[-1])
            assert (count, local_count) == (4, 4 // process_count)
            totals.add(total)
    assert len(totals) == 1


@pytest.mark.multiprocess
def test_a_sum_over_two_devices_is_the_same_bits_in_one_process_without_sockets(run_processes):
    said = SUM_OVER_DEVICES + "print(jax.config.jax_cpu_collectives_implementation)"
    found = {
        (count, *result.stdout.splitlines()[-2:])
        for count in (1, 2)
        for result in run_processes(said, count, devices=2 // count)
    }
    (_, alone, sender), (_, together, senders) = sorted(found)
    assert (sender, senders) == ("None", "gloo")
    assert json.loads(alone) == [2, 2, total := json.loads(alone)[2]] and json.loads(together) == [2, 1, total]


@pytest.mark.multiprocess
def test_process_zero_lists_the_hosts_and_the_others_are_quiet(run_processes):
    zero, one = run_processes("", 2, devices=2)
    place = f"{socket.gethostname()} (127.0.0.1, jax {jax.__version__}, python {platform.python_version()})"
    assert f"{place}: process 0: 2 x cpu; process 1: 2 x cpu" in zero.stderr
    assert one.stderr == ""


@pytest.mark.multiprocess
def test_different_configurations_stop_all_processes_with_the_same_message(free_port):
    code = (
        "import os, sys\n"
        "from openpi_train.runtime import exits, logs, session\n"
        "from openpi_train.runtime.world import WorldFlags, find_world\n"
        "rank = int(sys.argv[1])\n"
        f"flags = WorldFlags(coordinator='127.0.0.1:{free_port}', num_processes=2, process_id=rank)\n"
        "logs.configure(rank)\n"
        "session.software = dict\n"
        "facts = {'experiment': {'seed': 7, 'optimizer': {'lr': sys.argv[1]}}}\n"
        "exits.run_guarded(lambda: session.start(find_world(flags, os.environ), facts=facts))\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(rank)], stderr=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    all_errors = [process.communicate(timeout=240)[1] for process in processes]
    for process, errors in zip(processes, all_errors, strict=True):
        assert process.returncode == 2
        assert "do not run the same: experiment.optimizer.lr is 0 there and 1 here." in errors
        assert "Traceback" not in errors


@pytest.mark.multiprocess
@pytest.mark.parametrize("process_count", [1, 2])
def test_sigterm_stops_all_processes_at_the_same_step(run_processes, process_count):
    results = run_processes(
        """
        for step in range(4000):
            if step == 3 and world.process_index == world.process_count - 1:
                os.kill(os.getpid(), 15)
            if preempt.stop_requested():
                time.sleep(0.5)
                times = preempt.stop_times()
                print(json.dumps([step, times.until_stopped_s, times.until_saved_s]), flush=True)
                session.stop()
                raise exits.Preempted(f"stopped at step {step}")
            time.sleep(0.05)
        """,
        process_count,
    )
    assert [result.returncode for result in results] == [75] * process_count, results
    all_times = [json.loads(result.stdout.splitlines()[-1]) for result in results]
    steps = {step for step, _, _ in all_times}
    assert len(steps) == 1 and 3 <= steps.pop() < 3999
    # All clocks are one here; 0.1 s is room for a step of the clock.
    assert all(0 <= stopped_s <= saved_s - 0.4 < 60 for _, stopped_s, saved_s in all_times)


@pytest.mark.multiprocess
def test_a_killed_peer_ends_the_others_with_code_70(run_processes):
    results = run_processes(
        """
        import numpy as np
        from jax.experimental import multihost_utils
        for step in range(20000):
            if step == 3 and world.process_index == 1:
                os.kill(os.getpid(), 9)
            multihost_utils.process_allgather(np.ones(3))
        """,
        2,
    )
    assert results[1].returncode == -signal.SIGKILL
    assert results[0].returncode == 70, results[0]
    assert "was lost" in results[0].stderr


@pytest.mark.multiprocess
def test_a_handshake_that_takes_too_long_ends_all_with_the_flag_to_raise(free_port):
    code = (
        "import sys, time\n"
        "from openpi_train.runtime import exits, logs, session\n"
        "from openpi_train.runtime.waiting import Timeouts\n"
        "from openpi_train.runtime.world import WorldFlags, find_world\n"
        "rank = int(sys.argv[1])\n"
        f"flags = WorldFlags(coordinator='127.0.0.1:{free_port}', num_processes=2, process_id=rank)\n"
        "logs.configure(rank)\n"
        "session.software = dict\n"
        "if rank == 1:\n"
        "    session._initialize = lambda *_: time.sleep(600)\n"
        "exits.run_guarded(lambda: session.start(find_world(flags, {}), timeouts=Timeouts(handshake_s=3)))\n"
    )
    command = [sys.executable, "-c", code]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    processes = [subprocess.Popen([*command, str(rank)], env=env, stderr=subprocess.PIPE, text=True) for rank in (0, 1)]
    all_errors = [process.communicate(timeout=240)[1] for process in processes]
    for process, errors in zip(processes, all_errors, strict=True):
        assert process.returncode == 70, errors
        assert re.search(r"within 3 s .*--timeouts\.handshake-s.*all have met", errors)
        assert f"some cannot call process 0 at 127.0.0.1:{free_port} a second time" in errors


WAIT_FOR_ALL = """
import threading
from openpi_train.runtime.phases import phase
with phase("waiting"):
    agree.barrier("all are up")
    if world.process_index == {victim}:
        {fault}
    agree.barrier("never", 300)
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_killed_while_others_wait_for_it_is_named(run_processes, victim):
    results = run_processes(WAIT_FOR_ALL.format(victim=victim, fault="os.kill(os.getpid(), 9)"), 2)
    assert results[victim].returncode == -signal.SIGKILL
    left = results[1 - victim]
    assert left.returncode == 70, left
    assert f"process {victim} on {socket.gethostname()} was lost" in left.stderr
    assert "where every thread of this process is:" in left.stderr


@pytest.mark.multiprocess
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_fails_alone_keeps_its_code_and_the_others_say_why(run_processes, victim):
    results = run_processes(WAIT_FOR_ALL.format(victim=victim, fault="raise exits.DataError('torn file')"), 2)
    assert results[victim].returncode == 3
    left = results[1 - victim]
    assert left.returncode == 70, left
    assert f"process {victim} on {socket.gethostname()} ended with code 3 (waiting): torn file" in left.stderr


@pytest.mark.multiprocess
def test_processes_that_fail_of_the_same_cause_keep_their_code(run_processes):
    # The second fails a little later by itself, for which the first one's last words leave it the time.
    fault = "pass\n    from openpi_train.runtime import watchdog; watchdog._SETTLE_S = 120.0\n"
    fault += "    time.sleep(0.5 * world.process_index); raise exits.NumbersError('loss nan at step 7')"
    results = run_processes(WAIT_FOR_ALL.format(victim=0, fault=fault), 2)
    assert [result.returncode for result in results] == [5, 5], results
    assert all("was lost" not in result.stderr and "ended with code" not in result.stderr for result in results)


@pytest.mark.multiprocess
def test_an_abort_that_no_other_process_caused_stays_one(run_processes):
    results = run_processes(WAIT_FOR_ALL.format(victim=1, fault="os.abort()"), 2)
    assert results[1].returncode == -signal.SIGABRT
    assert "aborted by C++ code" in results[1].stderr and "where every thread" in results[1].stderr
    assert results[0].returncode == 70
    assert "process 1 on" in results[0].stderr and "was lost (waiting)" in results[0].stderr


@pytest.mark.multiprocess
def test_a_signal_before_all_have_met_ends_the_process_for_a_requeue(free_port):
    code = (
        "import os\n"
        "from openpi_train.runtime import exits, logs, session\n"
        "from openpi_train.runtime.world import WorldFlags, find_world\n"
        f"flags = WorldFlags(coordinator='127.0.0.1:{free_port}', num_processes=2, process_id=0)\n"
        "logs.configure(0)\n"
        "exits.run_guarded(lambda: session.start(find_world(flags, os.environ)))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", free_port)) == 0:
                break
        time.sleep(0.1)
    process.send_signal(signal.SIGUSR1)
    errors = process.communicate(timeout=240)[1]
    assert process.returncode == 75, errors
    assert "asked to stop before the run began" in errors


@pytest.mark.multiprocess
def test_the_coordinator_may_have_an_ipv6_address(run_processes):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 loopback on this machine")
    for address in ("[::1]", "::1"):
        results = run_processes("", 2, MASTER_ADDR=address)
        assert [result.returncode for result in results] == [0, 0], results


@pytest.mark.multiprocess
def test_a_proxy_does_not_swallow_the_coordinator(run_processes):
    proxy = "http://127.0.0.1:9"  # nobody listens
    results = run_processes("", 2, http_proxy=proxy, https_proxy=proxy, no_proxy="elsewhere", NO_PROXY="elsewhere")
    assert [result.returncode for result in results] == [0, 0], results


def world(local_index, local_count):
    return World(
        process_index=local_index,
        process_count=8,
        local_index=local_index,
        local_count=local_count,
        coordinator="a:1",
        source="flags",
    )


@pytest.mark.parametrize(
    ("local_index", "local_count", "visible", "expected"),
    [
        (0, 1, "0,1,2,3", None),
        (2, 4, "0,1,2,3", [2]),
        (1, 2, "4,5,6,7", [2, 3]),
        (3, None, "0,1,2,3", [3]),
        (3, 4, "2", None),
    ],
)
def test_gpus_are_shared_out_in_order(local_index, local_count, visible, expected):
    assert share_of_gpus(world(local_index, local_count), {"CUDA_VISIBLE_DEVICES": visible}) == expected


@pytest.mark.parametrize(("local_index", "local_count", "visible"), [(0, 3, "0,1"), (0, 2, "0,1,2"), (4, None, "0,1")])
def test_gpus_that_cannot_be_shared_out_are_refused(local_index, local_count, visible):
    with pytest.raises(UsageError, match="cannot have an equal share"):
        share_of_gpus(world(local_index, local_count), {"CUDA_VISIBLE_DEVICES": visible})


@pytest.mark.parametrize("restart", ["OPENPI_TRAIN_RESTART", "SLURM_RESTART_COUNT"])
def test_at_a_restart_a_gpu_that_is_missing_is_failed_hardware(restart):
    seven = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6"}
    with pytest.raises(HardwareError, match="cannot have an equal share of its 7 GPUs"):
        share_of_gpus(world(0, 8), {**seven, restart: "1"})
    with pytest.raises(UsageError):
        share_of_gpus(world(0, 8), {**seven, restart: "0"})


def test_the_software_facts_name_code_and_versions():
    facts = software()
    assert {"code of openpi_train", "version of jax", "version of python"} <= facts.keys()
    assert facts == software()
