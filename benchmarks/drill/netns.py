"""Namespaces as hosts: each with its own address, host name, processes, disk and memory, on a switch of their own.

A host lives as long as the first process in it, and that as long as who made it. But for memory limits nothing has a
name on this machine: when the processes have ended, the kernel clears all away. Read next: `remote_shell.py`.
"""

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from benchmarks.drill.memory_limit import MemoryLimit
from benchmarks.report import ROOT

NEEDED = ("ip", "ss", "tc", "unshare", "nsenter", "mount", "hostname")
_NAMESPACES = ("--net", "--uts", "--mount", "--pid")
# The first process of a host. Orphans become its children, and go when they end.
_INIT = (
    "import signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); print('ready', flush=True); sys.stdin.read()"
)
# A link address that no host has: what is sent there is lost without a word.
_NOBODY = "02:00:00:00:ff:ff"


def why_not() -> str | None:
    """Why there can be no hosts here; None if there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        return f"{', '.join(missing)} not installed (Debian: iproute2, util-linux, mount, hostname)"
    done = subprocess.run(
        ["unshare", *_NAMESPACES, "--fork", "--mount-proc", "true"], capture_output=True, text=True, check=False
    )
    return f"network namespaces are not permitted here: {done.stderr.strip()}" if done.returncode else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """What each host has of its own. `memory_bytes` and `disk_bytes` (its /tmp) are this machine's if None."""

    memory_bytes: int | None = None
    disk_bytes: int | None = None


class Host:
    """One host: `address` on the switch, `name` known to all the others. `enter` is a command's prefix to run there.

    The desk has no processes of its own: what is started there has this machine's numbers, and gets its signals.
    """

    def __init__(self, name: str, address: str, folder: Path, hardware: Hardware, *, own_processes: bool = True):
        self.name, self.address, self._folder, self._hardware = name, address, folder, hardware
        self._own_processes = own_processes
        self.limit = MemoryLimit(name, hardware.memory_bytes) if hardware.memory_bytes else None
        self._boot()

    def _boot(self) -> None:
        kinds = [kind for kind in _NAMESPACES if kind != "--pid" or self._own_processes]
        apart = ["--fork", "--kill-child", "--mount-proc"] if self._own_processes else []
        init = [sys.executable, "-ISc", _INIT]
        self._holder = subprocess.Popen(
            [*self._limited, "unshare", *kinds, *apart, "sh", "-ec", f'{self._setup()} && exec "$@"', "init", *init],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None and self._holder.stderr is not None
        if self._holder.stdout.readline() != "ready\n":
            raise RuntimeError(f"host {self.name}: {self._holder.stderr.read()}")
        self.pid = _only_child(self._holder.pid) if self._own_processes else self._holder.pid
        words = ("nsenter", f"--target={self.pid}", *kinds, "env", f"--chdir={os.getcwd()}")
        self.enter = (*self._limited, *words)

    @property
    def _limited(self) -> tuple[str, ...]:
        return self.limit.prefix if self.limit else ()

    def _setup(self) -> str:
        # /run is the host's own: sshd wants a folder there, and ip would leave its names.
        steps = [f"hostname {self.name}", f"mount --bind {self._folder}/hosts /etc/hosts", "mount -t tmpfs tmpfs /run"]
        steps += ["mkdir /run/sshd", "mount -t tmpfs tmpfs /dev/shm", "ip link set lo up"]
        if self._own_processes:
            boot_id = self._folder / f"boot_id_{self.name}"
            boot_id.write_text(f"{uuid.uuid4()}\n")
            steps.append(f"mount --bind {boot_id} /proc/sys/kernel/random/boot_id")
        if self._hardware.disk_bytes:
            steps += _own_disk(self._hardware.disk_bytes, [self._folder, ROOT, Path(sys.prefix)])
        return " && ".join(steps)

    def run(self, *command: str | Path) -> str:
        """What `command` prints, run on the host. Raises if it fails."""
        words = [*self.enter, *map(str, command)]
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=240).stdout

    def is_on(self) -> bool:
        """Whether the host has power."""
        return self._holder.poll() is None

    def pids(self) -> list[int]:
        """All processes on the host but those that keep it alive, as this machine numbers them."""
        if not self.is_on():
            return []
        with contextlib.suppress(OSError):
            own = os.stat(f"/proc/{self.pid}/ns/net").st_ino
            return [pid for pid in _in_network(own) if pid not in (self.pid, self._holder.pid)]
        return []

    def find(self, words: str) -> list[int]:
        """The processes on the host that have `words` in their command line."""
        found = []
        for pid in self.pids():
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if words in line:
                    found.append(pid)
        return found

    def clear(self) -> None:
        """End every process on the host."""
        deadline = time.monotonic() + 120
        while (left := self.pids()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def remove(self) -> None:
        """End the host; its interfaces go with it."""
        self.clear()
        self._stop()
        if self.limit:
            self.limit.remove()

    def _stop(self) -> None:
        self._holder.kill()
        self._holder.communicate()
        deadline = time.monotonic() + 30
        while Path(f"/proc/{self.pid}").exists() and time.monotonic() < deadline:
            time.sleep(0.01)


class Network:
    """A switch, which is also the desk from which a user starts things, and `count` hosts with a cable to it each."""

    def __init__(self, folder: Path, count: int = 4, hardware: Hardware | None = None):
        hardware = hardware or Hardware()
        self._on_boot: list[Callable[[Host], object]] = []
        names = ["desk", *(f"node{index}" for index in range(count))]
        addresses = {name: f"10.77.0.{index + 1}" for index, name in enumerate(names)}
        lines = [f"{address} {name}" for name, address in addresses.items()]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
        self.desk = Host("desk", addresses["desk"], folder, Hardware(), own_processes=False)
        self.hosts: list[Host] = []
        self.desk.run("ip", "link", "add", "br0", "type", "bridge")
        self.desk.run("ip", "address", "add", f"{self.desk.address}/24", "dev", "br0")
        self.desk.run("ip", "link", "set", "br0", "up")
        for name in names[1:]:
            self.hosts.append(Host(name, addresses[name], folder, hardware))
            self._plug(len(self.hosts) - 1)

    def _plug(self, index: int) -> None:
        host, port = self.hosts[index], f"port{index}"
        address = f"02:00:00:00:00:{index + 2:02x}"
        far_end = ("name", "eth0", "address", address, "netns", str(host.pid))
        self.desk.run("ip", "link", "add", port, "type", "veth", "peer", *far_end)
        host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "up")
        self.desk.run("ip", "link", "set", port, "master", "br0", "up")

    def on_boot(self, start: Callable[[Host], object]) -> None:
        """Call `start` for every host, now and whenever it is switched on again."""
        self._on_boot.append(start)
        for host in self.hosts:
            start(host)

    def power_off(self, index: int) -> None:
        """Take host `index`'s power: no last words reach the others, and what was on its disk and in memory is gone."""
        host = self.hosts[index]
        self.link(index, up=False)
        host._stop()
        # Its end of the cable goes some time after its last process.
        self.desk.run("sh", "-c", f"ip link delete port{index} 2>/dev/null || true")

    def power_on(self, index: int) -> None:
        """Start host `index` again, with the address that it had."""
        host = self.hosts[index]
        host._boot()
        self._plug(index)
        for start in self._on_boot:
            start(host)

    def link(self, index: int, up: bool) -> None:
        """Plug in host `index`'s cable, or pull it out at the switch."""
        self.desk.run("ip", "link", "set", f"port{index}", "up" if up else "down")

    def throttle(self, index: int, rate: str | None, *, latency: str = "400ms") -> None:
        """Limit what host `index` sends to `rate` ("20mbit"), or no longer.

        What waits for longer than `latency` is lost."""
        limit = ("root", "tbf", "rate", rate, "burst", "32kbit", "latency", latency) if rate else ("root",)
        self.hosts[index].run("tc", "qdisc", "replace" if rate else "delete", "dev", "eth0", *limit)

    def part(self, one: int, other: int, *, apart: bool) -> None:
        """Lose all that two hosts send to each other, while all others reach both; or no longer."""
        for here, there in ((one, other), (other, one)):
            host, address = self.hosts[here], self.hosts[there].address
            if not host.is_on():
                continue
            if apart:
                host.run("ip", "neighbour", "replace", address, "lladdr", _NOBODY, "dev", "eth0", "nud", "permanent")
            else:
                host.run("sh", "-c", f"ip neighbour delete {address} dev eth0 2>/dev/null || true")

    def remove(self) -> None:
        """Nothing of it is left."""
        for host in (*self.hosts, self.desk):
            host.remove()


def _own_disk(size_bytes: int, kept: list[Path]) -> list[str]:
    """The commands that give /tmp a disk of its own, on which `kept` are still seen where they lay below /tmp."""
    tmp = Path(tempfile.gettempdir())
    kept = [path.resolve() for path in kept if path.resolve().is_relative_to(tmp.resolve())]
    steps = []
    for number, path in enumerate(kept):
        steps += [f"mkdir /run/kept{number}", f"mount --rbind {path} /run/kept{number}"]
    steps.append(f"mount -t tmpfs -o size={size_bytes},mode=1777 tmpfs {tmp}")
    for number, path in enumerate(kept):
        steps += [f"mkdir -p {path}", f"mount --rbind /run/kept{number} {path}"]
    return steps


def _only_child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())


def _in_network(inode: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (path / "ns/net").stat().st_ino == inode:
                found.append(int(path.name))
    return found
