"""Network namespaces as hosts: each with its own address, host name and hosts file, on a switch of their own.

A host lives as long as a process that waits in it, and that as long as who made it. Nothing has a name on this machine:
when the processes have ended, the kernel clears all away. Read next: `conftest.py`, the fixtures.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

NEEDED = ("ip", "ss", "tc", "unshare", "nsenter", "mount", "hostname")


def why_not() -> str | None:
    """Why there can be no hosts here; None if there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        return f"{', '.join(missing)} not installed (Debian: iproute2, util-linux, mount, hostname)"
    done = subprocess.run(["unshare", "-num", "true"], capture_output=True, text=True, check=False)
    return f"network namespaces are not permitted here: {done.stderr.strip()}" if done.returncode else None


class Host:
    """One host: `address` on the switch, `name` known to all the others. `enter` is a command's prefix to run there."""

    def __init__(self, name: str, address: str, folder: Path):
        self.name, self.address = name, address
        # /run is the host's own: sshd wants a folder there, and ip would leave its names.
        setup = (
            f"hostname {name} && mount --bind {folder}/hosts /etc/hosts && mount -t tmpfs tmpfs /run && "
            "mkdir /run/sshd && ip link set lo up && echo ready && exec cat"
        )
        self._holder = subprocess.Popen(
            ["unshare", "-num", "sh", "-c", setup],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None and self._holder.stderr is not None
        if self._holder.stdout.readline() != "ready\n":
            raise RuntimeError(f"host {name}: {self._holder.stderr.read()}")
        self.pid = self._holder.pid
        self.enter = ("nsenter", f"--target={self.pid}", "--net", "--uts", "--mount", "env", f"--chdir={os.getcwd()}")

    def run(self, *command: str | Path) -> str:
        """What `command` prints, run on the host. Raises if it fails."""
        words = [*self.enter, *map(str, command)]
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=240).stdout

    def pids(self) -> list[int]:
        """All processes on the host but the one that keeps it alive."""
        own = os.stat(f"/proc/{self.pid}/ns/net").st_ino
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (path / "ns/net").stat().st_ino == own and int(path.name) != self.pid:
                    found.append(int(path.name))
        return found

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
        self._holder.kill()
        self._holder.communicate()


class Network:
    """A switch, which is also the desk from which a user starts things, and `count` hosts with a cable to it each."""

    def __init__(self, folder: Path, count: int = 4):
        names = ["desk", *(f"node{index}" for index in range(count))]
        addresses = {name: f"10.77.0.{index + 1}" for index, name in enumerate(names)}
        lines = [f"{address} {name}" for name, address in addresses.items()]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
        self.desk = Host("desk", addresses["desk"], folder)
        self.hosts: list[Host] = []
        self.desk.run("ip", "link", "add", "br0", "type", "bridge")
        self.desk.run("ip", "address", "add", f"{self.desk.address}/24", "dev", "br0")
        self.desk.run("ip", "link", "set", "br0", "up")
        for index, name in enumerate(names[1:]):
            host = Host(name, addresses[name], folder)
            self.hosts.append(host)
            cable = ("type", "veth", "peer", "name", f"port{index}")
            host.run("ip", "link", "add", "eth0", *cable, "netns", str(self.desk.pid))
            host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
            host.run("ip", "link", "set", "eth0", "up")
            self.desk.run("ip", "link", "set", f"port{index}", "master", "br0", "up")

    def link(self, index: int, up: bool) -> None:
        """Plug in host `index`'s cable, or pull it out at the switch."""
        self.desk.run("ip", "link", "set", f"port{index}", "up" if up else "down")

    def throttle(self, index: int, rate: str | None) -> None:
        """Limit what host `index` sends to `rate` ("20mbit"), or no longer."""
        limit = ("root", "tbf", "rate", rate, "burst", "32kbit", "latency", "400ms") if rate else ("root",)
        self.hosts[index].run("tc", "qdisc", "replace" if rate else "delete", "dev", "eth0", *limit)

    def remove(self) -> None:
        """Nothing of it is left."""
        for host in (*self.hosts, self.desk):
            host.remove()
