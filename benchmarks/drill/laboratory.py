"""Where a drill takes place: hosts, a desk, ssh between them, and a disk that all share. Read next: `running.py`."""

import contextlib
import dataclasses
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.drill import windows
from benchmarks.drill.memory_limit import why_no_limit
from benchmarks.drill.netns import Hardware, Network
from benchmarks.drill.remote_shell import real_ssh, sshd, stand_in

# A process needs 0.6 GB.
_MEMORY_BYTES, _LOCAL_BYTES, _SHARED_BYTES = 3 << 30, 192 << 20, 512 << 20
_PASSED_ON = ("XLA_FLAGS", "JAX_TRACEBACK_IN_LOCATIONS_LIMIT")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Laboratory:
    """`folder` lies on this machine, and all hosts see it; `shared` is the disk for the runs. `disk` makes it
    misbehave, None where it cannot. `missing` says what this machine does not permit, by name.
    """

    folder: Path
    shared: Path
    behind: Path
    network: Network
    ssh: str
    armed: windows.Armed
    disk: Any = None
    missing: dict[str, str]

    @property
    def environ(self) -> dict[str, str]:
        """The variables of the run's processes."""
        return {
            **{name: os.environ[name] for name in _PASSED_ON if name in os.environ},
            "JAX_COMPILATION_CACHE_DIR": f"{self.folder}/compiled",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PLATFORMS": "cpu",
            "OPENPI_TRAIN_HOME": f"{self.folder}/home",
            "PYTHONPATH": str(windows.INSIDE),
            "DRILL_FAULTS": str(self.armed.folder),
        }

    def index(self, host: str) -> int:
        """The number of the host of this name."""
        return [one.name for one in self.network.hosts].index(host)


@contextlib.contextmanager
def laboratory(folder: Path, num_hosts: int) -> Iterator[Laboratory]:
    """Set everything up in `folder`, and take it down at the end."""
    missing = {}
    behind, shared = folder / "behind", folder / "shared"
    with contextlib.ExitStack() as stack:
        for place in (behind, shared):
            place.mkdir()
        if not stack.enter_context(_own_disk(behind)):
            missing["own disk"] = "no file system can be mounted"
        disk = _bad_disk(stack, behind, shared, missing)
        if disk is None:
            shared = behind
        if reason := why_no_limit():
            missing["memory"] = reason
        hardware = Hardware(memory_bytes=None if reason else _MEMORY_BYTES, disk_bytes=_LOCAL_BYTES)
        network = Network(folder, num_hosts, hardware)
        stack.callback(network.remove)
        if sshd() is None:
            missing["ssh"] = "no OpenSSH server (Debian: openssh-server): connections go by no cable"
        yield Laboratory(
            folder=folder,
            shared=shared,
            behind=behind,
            network=network,
            ssh=(stand_in if "ssh" in missing else real_ssh)(network, folder),
            armed=windows.Armed(folder / "faults"),
            disk=disk,
            missing=missing,
        )


def _bad_disk(stack: contextlib.ExitStack, behind: Path, shared: Path, missing: dict[str, str]) -> Any:
    try:
        module = importlib.import_module("benchmarks.drill.bad_disk")
    except ImportError as error:
        missing["bad disk"] = str(error)
        return None
    if reason := module.why_not():
        missing["bad disk"] = reason
        return None
    return stack.enter_context(module.BadDisk(behind, shared))


@contextlib.contextmanager
def _own_disk(folder: Path) -> Iterator[bool]:
    """Mount a file system of limited size at `folder`; yields whether it could."""
    if sys.platform != "linux":
        yield False
        return
    command = ["mount", "-t", "tmpfs", "-o", f"size={_SHARED_BYTES}", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
