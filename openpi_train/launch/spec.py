"""What to start, where, and with which environment: pure data, no process. Read next: `processes.py`, which starts it.

Every launcher describes its run as a `LaunchSpec` and asks `commands` what that means for each process.
"""

import dataclasses
import re
import shlex
import sys

DEFAULT_PORT = 29500
# Which process is which: for launchers to say, never for --env.
_PLACE_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"),
    *("OPENPI_TRAIN_NUM_PROCESSES", "OPENPI_TRAIN_COORDINATOR"),
)


class LaunchError(Exception):
    """The launch cannot be done as asked; the message says what to change. Exit code 2."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """A run of `processes_per_host` processes on each of `hosts`; the first host is the master."""

    arguments: tuple[str, ...]
    """What follows `python -m openpi_train` in every process."""
    processes_per_host: int
    hosts: tuple[str, ...] = ("127.0.0.1",)
    """Addresses, or any labels for hosts other than the first, whose address all must be able to reach."""
    port: int = DEFAULT_PORT
    """Port of the master for jax's coordinator; the one after it is for the rendezvous."""
    devices_per_process: int | None = None
    """CPU devices that each process makes; None leaves the devices to jax."""
    token: str = ""
    """Word that keeps processes of other jobs out."""
    program: tuple[str, ...] = (sys.executable, "-m", "openpi_train")

    def __post_init__(self):
        if self.processes_per_host < 1 or not self.hosts:
            raise LaunchError(f"{self.processes_per_host} processes on {len(self.hosts)} hosts: there must be one")
        if not 1 <= self.port <= 65534:
            raise LaunchError(f"port {self.port} is not from 1 to 65534")
        if self.devices_per_process is not None and self.devices_per_process < 1:
            raise LaunchError(f"{self.devices_per_process} devices per process: there must be at least one")
        if not self.arguments:
            raise LaunchError("nothing to run: put the experiment after --, as in `-- pi0_bridge_traj --exp-name x`")


def check_variable(name: str) -> None:
    """Raise LaunchError where `name` cannot be a variable of --env."""
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise LaunchError(f"--env: {name!r} is not the name of a variable; give NAME=VALUE")
    if name in _PLACE_VARIABLES:
        raise LaunchError(f"--env {name}: the launcher itself says which process is which; leave it out")


@dataclasses.dataclass(frozen=True)
class ProcessCommand:
    """One process: the host it belongs on, its command line, and what it needs in its environment besides the usual."""

    host: str
    argv: tuple[str, ...]
    env: dict[str, str]

    @property
    def rank(self) -> int:
        return int(self.env["RANK"])

    def line(self) -> str:
        """A shell line that starts the process by hand."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*variables, shlex.join(self.argv)])


def commands(spec: LaunchSpec) -> list[ProcessCommand]:
    """The processes of a run, host by host, in the order of their ranks."""
    return [
        ProcessCommand(host, (*spec.program, *spec.arguments), _environment(spec, node, local))
        for node, host in enumerate(spec.hosts)
        for local in range(spec.processes_per_host)
    ]


def _environment(spec: LaunchSpec, node: int, local: int) -> dict[str, str]:
    environment = {
        "RANK": node * spec.processes_per_host + local,
        "WORLD_SIZE": len(spec.hosts) * spec.processes_per_host,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": spec.processes_per_host,
        "NODE_RANK": node,
        "MASTER_ADDR": spec.hosts[0],
        "MASTER_PORT": spec.port,
    }
    if len(spec.hosts) > 1:
        environment["OPENPI_TRAIN_HOSTS"] = ",".join(spec.hosts)  # so that waits can name who is missing
    if spec.devices_per_process is not None:
        environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": spec.devices_per_process}
    if spec.token:
        environment["OPENPI_TRAIN_JOB_TOKEN"] = spec.token
    return {name: str(value) for name, value in environment.items()}
