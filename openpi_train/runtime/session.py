"""Start and stop jax as one of N processes. Read next: `world.py` (this process's index), `rendezvous.py` (agreement
of all processes), `watchdog.py` (loss of a process).

`jax.distributed.initialize` is called for one process too: a plain process would sum in another order, and
a run would then depend on the number of processes and not only on its mesh; and SIGTERM would not be caught.
"""

import contextlib
import hashlib
import importlib.metadata
import logging
import math
import os
import platform
import socket
import time
from collections.abc import Mapping
from pathlib import Path

import jax

import openpi_train
from openpi_train.runtime import agree, compile_cache, phases, preempt, xla
from openpi_train.runtime.exits import HardwareError, UsageError
from openpi_train.runtime.heap import keep_freed_memory
from openpi_train.runtime.open_files import allow_open_files
from openpi_train.runtime.peer import Peer
from openpi_train.runtime.phases import phase
from openpi_train.runtime.rendezvous import meet
from openpi_train.runtime.step_times import StepTimes
from openpi_train.runtime.tunnel import Tunnels, jax_address, private_socket
from openpi_train.runtime.waiting import Timeouts
from openpi_train.runtime.watchdog import Watchdog
from openpi_train.runtime.world import World, is_restart, split_address

logger = logging.getLogger(__name__)

# jax aborts when one of its own time-outs expires: the watchdog's are shorter, except when jax shuts down.
_SHUTDOWN_S = 60
_SLACK_S = 40
# For the identification of all processes, once jax has started on them.
_GREETING_S = 300

_watchdog: Watchdog | None = None
_tunnels: Tunnels | None = None


def start(
    world: World,
    *,
    facts: Mapping[str, object] | None = None,
    devices_per_process: int | None = None,
    timeouts: Timeouts | None = None,
    shared_folder: Path | None = None,
) -> World:
    """Meet the other processes, start jax with them, and return `world`.

    Every process must call it, once, before anything touches a device.

    Args:
        facts: values that must be equal on all processes besides the code and the library versions: the configuration,
            as nested dictionaries of JSON values. A difference is reported by its path.
        shared_folder: a folder that all processes see, for the secret by which they know each other, if no launcher
            gave them one.
        timeouts: those of the run; None: the usual ones, and none on phases.
        devices_per_process: number of CPU devices to create; for runs without accelerators.

    Raises:
        UsageError: the processes disagree, a port is taken, a name does not resolve, the GPUs cannot be divided
        equally, or this process may not open as many files as it needs.
        PeerLostError: a process did not come in time.
    """
    global _watchdog, _tunnels
    given, timeouts = timeouts, timeouts or Timeouts()
    for note in world.notes:
        logger.warning("%s", note)
    if devices_per_process is not None:
        jax.config.update("jax_num_cpu_devices", devices_per_process)
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    kind = xla.device_kind(platforms, os.environ)
    for line in xla.apply_settings(kind, os.environ, xla.extent_of(world, os.environ)):
        logger.info("environment: %s", line)
    memory = keep_freed_memory(os.environ) if kind == "cpu" else None
    allow_open_files(world.process_index, world.process_count, cpu_collectives=kind == "cpu")
    compile_cache.use(kind)
    with preempt.stoppable_start():
        peers: list[Peer] = []
        if world.process_count > 1:
            with phase("meeting the other processes"):
                everything = software() | flat_facts(facts or {})
                peers, _tunnels = meet(
                    world,
                    everything,
                    timeout_s=timeouts.rendezvous_s,
                    cpu_collectives=kind == "cpu",
                    shared_folder=shared_folder,
                )
        else:
            _send_in_memory_where_bits_allow()
        who = f"process {world.process_index} on {socket.gethostname()}"
        _watchdog = Watchdog(world.process_index, who, peers, timeouts, preempt.stop_noticed)
        _watchdog.start()
        if given is not None:
            phases.limit_by(given, shows=world.process_index == 0)
        with phase("starting jax"):
            local_device_ids = share_of_gpus(world, os.environ) if kind == "gpu" else None
            with private_socket() as path, _tunnels.starting(path) if _tunnels else contextlib.nullcontext():
                _initialize(world, jax_address(path), local_device_ids, timeouts, _watchdog)
            _report(world)
    if memory is not None:
        logger.info("environment: %s", memory)
    return world


def stop(timeout_s: float = Timeouts.finish_s) -> None:
    """Leave the run together: returns once all processes have called it.

    Only for runs that end without an error; after an exception `exits.run_guarded` ends the process without it.

    Raises:
        PeerLostError: a process did not call it within `timeout_s`.
    """
    with phase("leaving the run"):
        agree.barrier("the end of the run", timeout_s)
        jax.distributed.shutdown()
        if _tunnels is not None:
            _tunnels.close()
    if _watchdog is not None:
        _watchdog.close()


def told_times() -> dict[str, StepTimes]:
    """What each process has told of its steps, by its name; empty if this is not process 0."""
    return {} if _watchdog is None else _watchdog.told_times()


def software() -> dict[str, str]:
    """Versions and code of this process, which must be equal on all hosts of a run."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    code = hashlib.sha256()
    root = Path(openpi_train.__file__).parent
    for path in sorted(root.rglob("*.py")):
        code.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    versions = {f"version of {package}": importlib.metadata.version(package) for package in packages}
    python = ".".join(platform.python_version_tuple()[:2])
    return {**versions, "version of python": python, "code of openpi_train": code.hexdigest()[:12]}


def flat_facts(facts: Mapping[str, object]) -> dict[str, str]:
    """Nested facts as one dictionary of texts: {"a": {"b": 1}} gives {"a.b": "1"}."""
    flat: dict[str, str] = {}
    for name, value in facts.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{inner}": text for inner, text in flat_facts(value).items()}
        else:
            flat[name] = str(value)
    return flat


def share_of_gpus(world: World, environ: Mapping[str, str]) -> list[int] | None:
    """The GPUs of this host that this process uses, None for all visible ones.

    A single process per host uses all; several use equal shares in order. A process that knows its local index but not
    the number of processes on the host uses one, as expected by launchers that set only LOCAL_RANK.

    Raises:
        UsageError: the GPUs cannot be divided equally.
        HardwareError: so it is at a restart.
    """
    count = xla.num_gpus(environ)
    if world.local_count == 1:
        return None
    if "CUDA_VISIBLE_DEVICES" in environ and count == 1:
        return None  # the launcher gave each process its own
    processes = world.local_count or count
    if count == 0 or count % processes or world.local_index >= processes:
        # The launcher started the same before, and it could.
        kind = HardwareError if is_restart(environ) else UsageError
        raise kind(
            f"process {world.local_index} of {processes} on this host cannot have an equal share of its {count} GPUs: "
            "start as many processes as there are GPUs, a number that divides them, or one"
        )
    share = count // processes
    return list(range(world.local_index * share, (world.local_index + 1) * share))


def _initialize(
    world: World, address: str, local_device_ids: list[int] | None, timeouts: Timeouts, watchdog: Watchdog
) -> None:
    jax.config.update("jax_check_proxy_envs", False)  # it warns of every proxy variable: no proxy is on this way
    logger.info("starting jax: process %d of %d", world.process_index, world.process_count)
    begin = time.monotonic()
    too_long = (
        f"jax did not start on all processes within {timeouts.handshake_s:.0f} s (--timeouts.handshake-s), although "
        f"all have met: either they are slow, or some cannot call process 0 at {world.coordinator} a second time"
    )
    with watchdog.limit(timeouts.handshake_s, too_long):
        jax.distributed.initialize(
            coordinator_address=address,
            num_processes=world.process_count,
            process_id=world.process_index,
            local_device_ids=local_device_ids,
            cluster_detection_method="deactivate",
            coordinator_bind_address=address,
            initialization_timeout=math.ceil(timeouts.handshake_s) + _SLACK_S,
            heartbeat_timeout_seconds=math.ceil(timeouts.lost_s) + _SLACK_S,
            shutdown_timeout_seconds=_SHUTDOWN_S,
        )
    assert jax.process_count() == world.process_count, "the devices' backend does not see all processes"
    logger.info("jax started in %.1f s", time.monotonic() - begin)


def _send_in_memory_where_bits_allow() -> None:
    """Have two CPU devices of one process exchange numbers in memory instead of through gloo's sockets.

    Gloo's thread polls without a pause while a device has yet to ask for what has come, and takes its core. XLA's own
    collectives do not, and sum device after device, where gloo sums around a ring: of two numbers the same sum, of
    more another rounding, which would depend on the number of processes.
    """
    if jax.config.jax_num_cpu_devices == 2:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_cpu_collectives_implementation", None)


def _report(world: World) -> None:
    """Log one line per host on process 0, with address, processes, devices and versions."""
    devices = jax.local_devices()
    own = f"process {world.process_index}: {len(devices)} x {devices[0].device_kind}"
    versions = f"jax {jax.__version__}, python {platform.python_version()}"
    everyone = agree.gather("who is there", [socket.gethostname(), _address(world), versions, own], _GREETING_S)
    agree.name_hosts([host for host, *_ in everyone])
    lines: dict[tuple[str, ...], list[str]] = {}
    for *place, line in everyone:
        lines.setdefault(tuple(place), []).append(line)
    for (host, address, software_there), there in lines.items():
        logger.info("%s (%s, %s): %s", host, address, software_there, "; ".join(there))


def _address(world: World) -> str:
    """This host's address towards the coordinator."""
    if world.process_count == 1:
        return "127.0.0.1"
    assert world.coordinator is not None
    host, port = split_address(world.coordinator)
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing
        return probe.getsockname()[0]
