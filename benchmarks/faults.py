"""Things that happen to a run, done to one of the `debug` experiment. Read next: `fault_drill.py`, which does many.

Each fault returns the moment from which the run's recovery is counted, once the run has noticed and is down.
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

# From the fault to the end of all processes: the limits that the drill gives its run, and some patience.
_DOWN_S = 90.0
_DISK_BYTES = 256 << 20
# What a filling disk still takes: lines of logs, but no checkpoint.
_LEFT_BYTES = 256 << 10


class FaultFailed(Exception):
    """The fault had another consequence than it must have."""


def kill(run: Launched, rng: random.Random) -> float:
    """SIGKILL to a process."""
    return _signal(run, rng, signal.SIGKILL)


def kill_while_starting(run: Launched, rng: random.Random) -> float:
    """SIGKILL to a process, and another while the run starts again."""
    kill(run, rng)
    if not run.wait(run.processes, _DOWN_S):
        raise FaultFailed("the run did not start again")
    time.sleep(rng.uniform(0.0, 6.0))
    return kill(run, rng)


def ask_to_stop(run: Launched, rng: random.Random) -> float:
    """SIGTERM to a process: all save and stop."""
    return _signal(run, rng, signal.SIGTERM)


def freeze(run: Launched, rng: random.Random) -> float:
    """SIGSTOP to a process until the others give it up, as they do a host behind a cut link."""
    return _signal(run, rng, signal.SIGSTOP)


def cut_link(run: Launched, rng: random.Random) -> float:
    """No packet between the processes until all have ended. For a run with a network of its own."""
    del rng
    at, victims = time.monotonic(), run.processes()
    _link(run, "down")
    try:
        _await_end(run, victims)
    finally:
        _link(run, "up")
    return at


def tear_file(run: Launched, rng: random.Random) -> float:
    """SIGKILL to a process, and a damaged file in the newest whole checkpoint while the run is down."""
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
    """No room for a checkpoint, until the run has ended; the launcher is not to start it again by itself."""
    at = time.monotonic()
    ballast = run.directory / "logs" / "ballast"
    try:
        with ballast.open("wb") as file:
            while (room := shutil.disk_usage(ballast).free - _LEFT_BYTES) > 0:
                with contextlib.suppress(OSError):  # a save has taken of it meanwhile
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
# How often each of them comes.
WEIGHTS = dict(zip(FAULTS, (6, 3, 4, 2, 2, 3, 2), strict=True))


def sequence(count: int, kinds: list[str], rng: random.Random) -> list[str]:
    """So many faults in random order, each kind as often as its weight says."""
    total = sum(WEIGHTS[kind] for kind in kinds)
    exact = {kind: WEIGHTS[kind] * count / total for kind in kinds}
    numbers = {kind: int(share) for kind, share in exact.items()}
    for kind in sorted(kinds, key=lambda kind: numbers[kind] - exact[kind])[: count - sum(numbers.values())]:
        numbers[kind] += 1
    order = [kind for kind in kinds for _ in range(numbers[kind])]
    rng.shuffle(order)
    return order


def has_own_network() -> bool:
    """Whether a run may be given a network of its own, so that its link can be cut."""
    try:
        return subprocess.run([*OWN_NETWORK, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A file system of its own at `folder`, if that may be made; yields whether."""
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
    """Send it to a random process, and return when once all of this start are gone."""
    victims = run.processes()
    if not victims:
        raise FaultFailed("no process was there")
    at = time.monotonic()
    with contextlib.suppress(ProcessLookupError):
        os.kill(victims[rng.choice(sorted(victims))], signum)
    _await_end(run, victims)
    return at


def _await_end(run: Launched, victims: Mapping[int, int]) -> None:
    """Return when all of these processes have ended, which `Launched.processes` found."""
    if not run.wait(lambda: not set(run.processes().values()) & set(victims.values()), _DOWN_S):
        raise FaultFailed(f"the processes did not end within {_DOWN_S:.0f} s")


def _link(run: Launched, state: str) -> None:
    command = ["nsenter", "--net", "--target", str(run.process.pid), "ip", "link", "set", "lo", state]
    subprocess.run(command, check=True, capture_output=True)
