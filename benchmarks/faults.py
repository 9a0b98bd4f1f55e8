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
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.launched import OWN_NETWORK, Launched

# From the fault to the end of all processes: the limits that the drill gives its run, and a margin.
_DOWN_S = 90.0
_DISK_BYTES = 256 << 20
# Free space left on a filled disk: enough for log lines, but not for a checkpoint.
_LEFT_BYTES = 256 << 10


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


FAULTS = {
    "kill -9 of a process": kill,
    "the same while it starts": kill_while_starting,
    "SIGTERM to a process": ask_to_stop,
    "frozen process": freeze,
    "cut link": cut_link,
    "damaged checkpoint": tear_file,
    "full disk": fill_disk,
}
# Weight of each kind.
WEIGHTS = dict(zip(FAULTS, (6, 3, 4, 2, 2, 3, 2), strict=True))


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
