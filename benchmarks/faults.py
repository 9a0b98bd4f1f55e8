"""Faults that are injected into a run of the `debug` experiment. Read next: `fault_drill.py`, which injects many.

Each fault waits until the run has noticed it and is down, and returns the time from which recovery is measured.
"""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from benchmarks.launched import OWN_NETWORK, Launched

# From the fault to the end of all processes: the limits that the drill gives its run, and a margin.
_DOWN_S = 90.0
_DISK_BYTES = 256 << 20
# Free space left on a filled disk: enough for log lines, but not for a checkpoint.
_LEFT_BYTES = 256 << 10


Fault = Callable[[Launched, random.Random], float]


class FaultFailed(Exception):
    """The fault did not have the expected consequence."""


def kill(run: Launched, rng: random.Random) -> float:
    """Send SIGKILL to a process."""
    return _signal(run, rng, signal.SIGKILL)


def kill_while_starting(run: Launched, rng: random.Random) -> float:
    """Send SIGKILL to a process, and to another while the run restarts."""
    kill(run, rng)
    if not run.wait(run.processes, _DOWN_S):
        raise FaultFailed("the run did not start again")
    time.sleep(rng.uniform(0.0, 6.0))
    return kill(run, rng)


def ask_to_stop(run: Launched, rng: random.Random) -> float:
    """Send SIGTERM to a process: all processes save and stop."""
    return _signal(run, rng, signal.SIGTERM)


def freeze(run: Launched, rng: random.Random) -> float:
    """Send SIGSTOP to a process until the others give it up, like a host behind a cut link."""
    return _signal(run, rng, signal.SIGSTOP)


def cut_link(run: Launched, rng: random.Random) -> float:
    """Block all packets between the processes until all have ended. Only for a run with its own network."""
    del rng
    at, victims = time.monotonic(), run.processes()
    _link(run, "down")
    try:
        _await_end(run, victims)
    finally:
        _link(run, "up")
    return at


def tear_file(run: Launched, rng: random.Random) -> float:
    """Send SIGKILL to a process, and damage a file of the newest complete checkpoint while the run is down."""
    at = kill(run, rng)
    step = run.checkpoints()[-1]
    files = sorted(path for path in (run.directory / str(step)).rglob("*") if path.is_file() and path.stat().st_size)
    path = rng.choice(files)
    with path.open("r+b") as file:
        place = rng.randrange(path.stat().st_size)
        if rng.random() < 0.5:
            file.truncate(place)
        else:
            file.seek(place)
            (byte,) = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ (1 << rng.randrange(8))]))
    return at


def injected(kind: str, text: str = "") -> Fault:
    """A fault from within a process, which ends the run: see `injected/sitecustomize.py` for kinds and texts."""

    def inject(run: Launched, rng: random.Random) -> float:
        victims = run.processes()
        rank = rng.choice(sorted(victims))
        at = time.monotonic()
        run.inject(rank, kind, text)
        _await_end(run, victims)
        return at

    return inject


def unreadable(run: Launched, rng: random.Random) -> float:
    """Send SIGKILL to a process; the next start cannot read the checkpoints at first."""
    victims = run.processes()
    rank = rng.choice(sorted(victims))
    run.inject(rank, "read", rng.choice(("EIO", "ESTALE")), not_pid=victims[rank])
    return kill(run, rng)


def undeletable(run: Launched, rng: random.Random) -> float:
    """From now on old checkpoints cannot be deleted; that must end no save. After two saves a process is killed."""
    run.inject(0, "delete", "EBUSY")
    before = run.checkpoints()[-1]
    if not run.wait(lambda: run.checkpoints()[-1] >= before + 20, _DOWN_S):
        raise FaultFailed("the run did not save while it could not delete")
    return kill(run, rng)


def crash(signum: int) -> Fault:
    """A signal that ends a process as a crash in C code does."""
    return lambda run, rng: _signal(run, rng, signum)


def fill_disk(run: Launched, rng: random.Random) -> float:
    """Fill the disk until the run has ended; the launcher must not restart it by itself."""
    at = time.monotonic()
    ballast = run.directory / "logs" / "ballast"
    try:
        with ballast.open("wb") as file:
            while (room := shutil.disk_usage(ballast).free - _LEFT_BYTES) > 0:
                with contextlib.suppress(OSError):  # a save has used some of it meanwhile
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, room)
        run.end(_DOWN_S)
    except subprocess.TimeoutExpired:
        raise FaultFailed("the run went on without room for a checkpoint") from None
    finally:
        ballast.unlink()
    return at


# By name: the fault and its weight. Shares are roughly those of the logs of real clusters: half of the faults are of
# GPUs (in the words of jaxlib's errors), the rest of hosts, networks, programs and disks.
_KINDS: dict[str, tuple[Fault, int]] = {
    "kill -9 of a process": (kill, 6),
    "the same while it starts": (kill_while_starting, 3),
    "SIGTERM to a process": (ask_to_stop, 4),
    "frozen process": (freeze, 2),
    "segmentation fault": (crash(signal.SIGSEGV), 2),
    "bus error": (crash(signal.SIGBUS), 1),
    "abort": (crash(signal.SIGABRT), 1),
    "GPU: uncorrectable memory error": (
        injected("step", "INTERNAL: CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered"),
        5,
    ),
    "GPU: fell off the bus": (injected("step", "INTERNAL: CUDA_ERROR_NO_DEVICE: no CUDA-capable device"), 3),
    "GPU: launch failed": (injected("step", "INTERNAL: CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure"), 3),
    "GPU: illegal address": (injected("step", "INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: illegal memory access"), 3),
    "GPU: link to another": (injected("step", "INTERNAL: CUDA_ERROR_NVLINK_UNCORRECTABLE: NVLink error"), 2),
    "network: NCCL's remote error": (injected("step", "INTERNAL: NCCL operation failed: ncclRemoteError"), 2),
    "hang in a step": (injected("step"), 2),
    "hang in a save": (injected("save"), 1),
    "disk: error in a save": (injected("save", "EIO"), 2),
    "disk: quota in a save": (injected("save", "EDQUOT"), 1),
    "disk: checkpoints unreadable at first": (unreadable, 2),
    "disk: nothing can be deleted": (undeletable, 1),
    "cut link": (cut_link, 2),
    "damaged checkpoint": (tear_file, 3),
    "full disk": (fill_disk, 2),
}
FAULTS = {name: fault for name, (fault, _) in _KINDS.items()}
# Weight of each kind.
WEIGHTS = {name: weight for name, (_, weight) in _KINDS.items()}


def sequence(count: int, kinds: list[str], rng: random.Random) -> list[str]:
    """Return `count` kinds of faults in random order, in proportion to their weights."""
    total = sum(WEIGHTS[kind] for kind in kinds)
    exact = {kind: WEIGHTS[kind] * count / total for kind in kinds}
    numbers = {kind: int(share) for kind, share in exact.items()}
    for kind in sorted(kinds, key=lambda kind: numbers[kind] - exact[kind])[: count - sum(numbers.values())]:
        numbers[kind] += 1
    order = [kind for kind in kinds for _ in range(numbers[kind])]
    rng.shuffle(order)
    return order


def has_own_network() -> bool:
    """Whether a run can have its own network, so that its link can be cut."""
    try:
        return subprocess.run([*OWN_NETWORK, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mount a separate small file system at `folder` if possible; yields whether it was."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _signal(run: Launched, rng: random.Random, signum: int) -> float:
    """Send a signal to a random process; returns the time once all processes of this start are gone."""
    victims = run.processes()
    if not victims:
        raise FaultFailed("no process was there")
    at = time.monotonic()
    with contextlib.suppress(ProcessLookupError):
        os.kill(victims[rng.choice(sorted(victims))], signum)
    _await_end(run, victims)
    return at


def _await_end(run: Launched, victims: Mapping[int, int]) -> None:
    """Wait until all of these processes, found by `Launched.processes`, have ended."""
    if not run.wait(lambda: not set(run.processes().values()) & set(victims.values()), _DOWN_S):
        raise FaultFailed(f"the processes did not end within {_DOWN_S:.0f} s")


def _link(run: Launched, state: str) -> None:
    command = ["nsenter", "--net", "--target", str(run.process.pid), "ip", "link", "set", "lo", state]
    subprocess.run(command, check=True, capture_output=True)
