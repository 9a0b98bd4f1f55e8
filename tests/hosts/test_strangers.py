"""A third host that speaks, floods and replays at every port of a run, before its start and while it trains."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet import CUT, RUN, ends, until
from runs.command import losses, train
from small_runs import SMALL

from benchmarks.drill.netns import Host
from openpi_train.launch.spec import DEFAULT_PORT

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
STRANGER = str(Path(__file__).with_name("stranger.py"))
STEPS = 30
CROWD = 750  # connections of `stranger.py` to each port
# jax's own client, as process 1 of the run.
JAX_CLIENT = f"""
from jax._src.lib import _jax
client = _jax.get_distributed_runtime_client("node0:{DEFAULT_PORT}", 1, init_timeout=1, heartbeat_timeout=10)
client.connect()
print("connected")
client.key_value_set("mine", "1")
client.shutdown()
"""
# Python's clock a day and a half ahead. The kernel's cannot differ between namespaces, so C++ code is not fooled.
OTHER_CLOCK = """
import time
now, now_ns = time.time, time.time_ns
time.time, time.time_ns = lambda: now() + 130_000, lambda: now_ns() + 130_000 * 10**9
"""


@contextlib.contextmanager
def stranger(host: Host, *words: str) -> Iterator[None]:
    """`stranger.py` on a host, from its `done` to the end of the block."""
    command = [*host.enter, sys.executable, STRANGER, *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "done\n"
        yield  # then its input ends, and so does it


def listening(host: Host) -> list[str]:
    """The addresses at which a run's process on the host can be called from others."""
    lines = host.run("ss", "-ltnH").splitlines()
    ports = {line.split()[3].rpartition(":")[2] for line in lines if not line.split()[3].startswith("127.")}
    return [f"{host.name}:{port}" for port in sorted(ports)]


def of_process(host: Host) -> tuple[int, int]:
    """Threads and open files of the training process on a host."""
    (pid,) = host.find(f"-m openpi_train {SMALL}")
    return len(list(Path(f"/proc/{pid}/task").iterdir())), len(list(Path(f"/proc/{pid}/fd").iterdir()))


def test_strangers_at_every_port_and_a_host_with_another_clock_change_nothing(fleet, network, tmp_path):
    steps = (*RUN, *CUT, "--num-train-steps", str(STEPS))
    train(tmp_path / "undisturbed", *steps, devices=2)
    (tmp_path / "sitecustomize.py").write_text(OTHER_CLOCK)
    zero, one, theirs, between = network.hosts
    address = f"node0:{DEFAULT_PORT}"
    # The run waits at step 23 until all has been tried.
    steps += ("--data.fault", "waits")
    gate = {"GATE": str(tmp_path / "gate")}

    first = fleet.manual(0, *steps, hosts=2)
    until(lambda: address in listening(zero), [first])
    with stranger(theirs, "crowd", address), stranger(between, "record", str(tmp_path)):
        # The second process reaches the first through a host that writes down all it says.
        second = fleet.manual(1, *steps, hosts=2, master="node3", PYTHONPATH=str(tmp_path), **gate)
        until(lambda: '"step": 2,' in fleet.metrics(), [first, second])
        before = of_process(zero)
        answers = between.run(sys.executable, STRANGER, "replay", str(tmp_path)).splitlines()
        ports = [*listening(zero), *listening(one)]
        with stranger(theirs, "crowd", *ports):
            threads, files = of_process(zero)
            with pytest.raises(subprocess.CalledProcessError) as failed:
                between.run(sys.executable, "-c", JAX_CLIENT)
            (tmp_path / "gate").touch()
            done = ends([first, second])

    assert [code for code, _ in done] == [0, 0], done
    assert losses(fleet.base, "small") == losses(tmp_path / "undisturbed", "small")
    assert ports.count(address) == 1 and not any(port.endswith(f":{DEFAULT_PORT + 1}") for port in ports)
    assert len(answers) == 2 and answers == ['{"said": "refused", "proof": ""}'] * 2, "a meeting and a tunnel"
    assert "connected" not in failed.value.stdout
    assert threads <= before[0] + 60 and files <= before[1] + 60 + CROWD, "gloo's one port keeps whoever has come"
    assert "ignored a stranger on the rendezvous port: b'GET / HTTP/1.1" in fleet.output("node0", 0)
    assert len(fleet.output("node0", 0)) < 60_000
