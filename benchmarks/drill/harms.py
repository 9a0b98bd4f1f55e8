"""What is done to a run from outside, each a `with` block: the harm at its begin, what must be mended at its end.

The run's launcher has noticed by then, or the run goes on without a restart. Read next: `kinds.py`, the table.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from benchmarks.drill.scene import FaultFailed, Scene

Outside = Callable[[Scene], AbstractContextManager[None]]
_AWAY_S = 3.0
_SLOW_S = 6.0
_DOWN_S = 120.0
# Free space left on a filled disk: on the shared one enough for log lines, but not for a checkpoint; a process's share
# of one, which lies on a host's own, has 36 kB.
_LEFT_BYTES, _LEFT_LOCALLY = 256 << 10, 8 << 10


@contextlib.contextmanager
def power_off(scene: Scene) -> Iterator[None]:
    """Take the power of the victim's host, until the launcher has noticed."""
    network, host = scene.lab.network, scene.host
    network.power_off(host)
    yield
    network.power_on(host)


@contextlib.contextmanager
def cut(scene: Scene) -> Iterator[None]:
    """Pull out the cable of the victim's host, until the launcher has noticed and the processes there have ended."""
    host = scene.host
    scene.lab.network.link(host, up=False)
    yield
    _await_end(scene, host)
    scene.lab.network.link(host, up=True)


@contextlib.contextmanager
def cut_for_seconds(scene: Scene) -> Iterator[None]:
    """Pull out the cable for a moment."""
    host = scene.host
    scene.lab.network.link(host, up=False)
    time.sleep(_AWAY_S)
    scene.lab.network.link(host, up=True)
    yield


@contextlib.contextmanager
def slow(scene: Scene) -> Iterator[None]:
    """Let the host send little, and lose what waits for long."""
    host = scene.host
    scene.lab.network.throttle(host, "4mbit", latency="20ms")
    time.sleep(_SLOW_S)
    scene.lab.network.throttle(host, None)
    yield


@contextlib.contextmanager
def partition(scene: Scene) -> Iterator[None]:
    """Lose all that two hosts send to each other; the desk reaches both."""
    one, other = scene.host, scene.another_host()
    scene.lab.network.part(one, other, apart=True)
    yield
    scene.lab.network.part(one, other, apart=False)


@contextlib.contextmanager
def cut_ssh(scene: Scene) -> Iterator[None]:
    """End the launcher's ssh to the victim's host."""
    assert scene.fired is not None
    _kill_ssh(scene.run.launched.process.pid, scene.fired.host)
    yield


@contextlib.contextmanager
def kill_launcher(scene: Scene) -> Iterator[None]:
    """SIGKILL to the launcher; then its scheduler starts the same command again."""
    scene.run.kill_launcher()
    yield
    time.sleep(scene.rng.uniform(0.0, 3.0))
    scene.run.start("--resume")


@contextlib.contextmanager
def tear_checkpoint(scene: Scene) -> Iterator[None]:
    """Flip a bit of a file of the newest checkpoint, or cut the file, while the run is down."""
    yield
    step = scene.run.checkpoints()[-1]
    files = sorted(path for path in (scene.run.files() / str(step)).rglob("*") if path.is_file())
    path = scene.rng.choice([path for path in files if path.stat().st_size])
    with path.open("r+b") as file:
        place = scene.rng.randrange(path.stat().st_size)
        if scene.rng.random() < 0.5:
            file.truncate(place)
        else:
            file.seek(place)
            (byte,) = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ (1 << scene.rng.randrange(8))]))


@contextlib.contextmanager
def tear_record(scene: Scene) -> Iterator[None]:
    """Write half a line to a log of the run, or cut one of its small JSON files, while the run is down."""
    yield
    folder = scene.run.files()
    name = scene.rng.choice(("metrics.jsonl", "time.jsonl", ".crash_loop.json", "best.json"))
    if not (folder / name).exists():
        return
    content = (folder / name).read_bytes()
    whole = scene.rng.randrange(len(content))
    (folder / name).write_bytes(content + b'{"step": 99, "lo' if name.endswith("l") else content[:whole])


@contextlib.contextmanager
def fill_shared_disk(scene: Scene) -> Iterator[None]:
    """Fill the shared disk until a save has failed."""
    with _filled(scene.lab.behind / "ballast", scene.lab.behind, _LEFT_BYTES):
        _await_line(scene, "The run goes on without it")
    yield


@contextlib.contextmanager
def fill_local_disk(scene: Scene) -> Iterator[None]:
    """Fill the disk of the victim's host until a save there has failed."""
    folder = Path(f"/proc/{scene.lab.network.hosts[scene.host].pid}/root/tmp")
    with _filled(folder / "ballast", folder, _LEFT_LOCALLY):
        _await_line(scene, "It is left out, on all; the run goes on")
    yield


def disk(kind: str, on: str, operations: tuple[str, ...], **how: float) -> Outside:
    """The shared disk refuses or delays, until the run has met that: see `BadDisk.misbehave`."""

    @contextlib.contextmanager
    def misbehave(scene: Scene) -> Iterator[None]:
        number = scene.lab.disk.misbehave(kind, on=on, operations=operations, **how)
        yield
        deadline = time.monotonic() + _DOWN_S
        while not scene.lab.disk.met(number):
            if time.monotonic() > deadline:
                raise FaultFailed(f"the run did not meet the disk's {kind} within {_DOWN_S:.0f} s")
            time.sleep(0.1)
        time.sleep(_AWAY_S)
        scene.lab.disk.heal()

    return misbehave


@contextlib.contextmanager
def kill_soon(scene: Scene) -> Iterator[None]:
    """SIGTERM to all processes on the host, which then loses its power: what a cloud does with a host it takes."""
    network, host = scene.lab.network, scene.host
    for one in scene.run.present().values():
        if one.host == host:
            os.kill(one.pid, signal.SIGTERM)
    time.sleep(scene.rng.uniform(1.0, 10.0))
    network.power_off(host)
    yield
    network.power_on(host)


@contextlib.contextmanager
def stay(scene: Scene) -> Iterator[None]:
    """Leave what the process has left behind until the verdict."""
    assert scene.fired is not None
    yield
    old = [one.pid for one in scene.run.processes() if one.token == scene.fired.token and one.host == scene.host]
    scene.left_behind += old


def _await_end(scene: Scene, host: int) -> None:
    assert scene.fired is not None
    deadline = time.monotonic() + _DOWN_S
    while any(one.host == host and one.token == scene.fired.token for one in scene.run.processes()):
        if time.monotonic() > deadline:
            raise FaultFailed(f"the processes on host {host} did not end within {_DOWN_S:.0f} s of its loss")
        time.sleep(0.2)


def _await_line(scene: Scene, words: str) -> None:
    if scene.run.launched.await_place(words, _DOWN_S, max(0, len(scene.run.lines) - 5)) is None:
        raise FaultFailed(f"nobody said {words!r}")


def _kill_ssh(launcher: int, host: str) -> None:
    children = Path(f"/proc/{launcher}/task")
    pids = {int(word) for path in children.glob("*/children") for word in path.read_text().split()}
    for pid in pids:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if words and b"ssh" in words[0] and host.encode() in words:
            os.kill(pid, signal.SIGKILL)
            return
    raise FaultFailed(f"the launcher has no ssh to {host}")


@contextlib.contextmanager
def _filled(ballast: Path, folder: Path, left: int) -> Iterator[None]:
    try:
        with ballast.open("wb") as file:
            for _ in range(20):  # what others write meanwhile
                free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize - left
                if free > 0:
                    with contextlib.suppress(OSError):
                        os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, free)
        yield
    finally:
        ballast.unlink()
