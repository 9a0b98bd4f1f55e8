"""The processes to start, with hosts and environment, as pure data. Read next: `processes.py`, which starts them.

Every launcher describes its run as a `LaunchSpec`; `commands` returns the command of each process.
"""

import dataclasses
import re
import shlex
import sys

from openpi_train import faults
from openpi_train.launch import own_python

DEFAULT_PORT = 29500
# The number of the restart, for a process that a launcher starts again.
RESTART_VARIABLE = "OPENPI_TRAIN_RESTART"
# The last step that earlier starts have saved, as far as the launcher knows: the run is there.
SAVED_STEP_VARIABLE = "OPENPI_TRAIN_SAVED_STEP"
# Variables that identify a process: set by launchers, never by --env.
_PLACE_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"),
    *("OPENPI_TRAIN_NUM_PROCESSES", "OPENPI_TRAIN_COORDINATOR"),
)
# Verbs of the command line that take no experiment's flags, such as --resume: they train nothing, or go on anyway.
VERBS_WITHOUT_RUN = (
    *("list", "launch", "stats", "data", "convert", "doctor", "plan", "compile", "serve", "eval", "generate"),
    *("report", "reproduce", "runs"),
)


class LaunchError(Exception):
    """The launch cannot be done as asked; the message says what to change. `exit_code` is that of the launcher."""

    def __init__(self, message: str, exit_code: int = faults.USAGE):
        super().__init__(message)
        self.exit_code = exit_code


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """A run of `processes_per_host` processes on each of `hosts`; the first host is the master."""

    arguments: tuple[str, ...]
    """The arguments after `python -m openpi_train` in every process."""
    processes_per_host: int
    hosts: tuple[str, ...] = ("127.0.0.1",)
    """The address of the first host, which all must reach; addresses or any labels for the others."""
    port: int = DEFAULT_PORT
    """Port of the master, where process 0 listens for the others."""
    devices_per_process: int | None = None
    """CPU devices that each process makes; None leaves the devices to jax."""
    token: str = ""
    """Secret by which the processes of a start know each other; "": process 0 makes one, in the run's folder."""
    restart: int = 0
    """How many starts of the run this launcher has made before."""
    saved_step: int = 0
    """The last step that they have saved."""
    program: tuple[str, ...] = dataclasses.field(default_factory=lambda: (this_python(), "-m", "openpi_train"))

    def __post_init__(self):
        if self.processes_per_host < 1 or not self.hosts:
            raise LaunchError(f"{self.processes_per_host} processes on {len(self.hosts)} hosts: there must be one")
        check_port(self.port, "port")
        if self.devices_per_process is not None and self.devices_per_process < 1:
            raise LaunchError(f"{self.devices_per_process} devices per process: there must be at least one")
        check_arguments(self.arguments)


def this_python() -> str:
    """The Python that runs this, for the processes. Raises LaunchError where it lacks the packages."""
    if problem := own_python.lacking():
        raise LaunchError("\n".join(problem))
    return sys.executable


def check_arguments(arguments: tuple[str, ...]) -> None:
    """Raise LaunchError if there is nothing to run."""
    if not arguments:
        raise LaunchError("nothing to run: put the experiment after --, as in `-- pi0_bridge_traj --exp-name x`")


def without_going_back(arguments: tuple[str, ...]) -> tuple[tuple[str, ...], str | None]:
    """The arguments without `--resume-from` of one of the run's own checkpoints, and that checkpoint, None without one.

    The path of another run stays: a run begins from it once only.
    """
    for index, word in enumerate(arguments):
        flag, equals, value = word.partition("=")
        if flag.replace("_", "-") == "--resume-from":
            last = index + (1 if equals else 2)
            value = value if equals else "".join(arguments[index + 1 : last])
            if value.isdecimal() or value in ("best", "latest"):
                return (*arguments[:index], *arguments[last:]), value
    return arguments, None


def check_port(port: int, name: str) -> None:
    """Raise LaunchError if `port` is invalid. `name` is the user's name for it."""
    if not 1 <= port <= 65535:
        raise LaunchError(f"{name} {port} is not from 1 to 65535")


def check_variable(name: str) -> None:
    """Raise LaunchError if `name` cannot be a variable of --env."""
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise LaunchError(f"--env: {name!r} is not the name of a variable; give NAME=VALUE")
    if name in _PLACE_VARIABLES:
        raise LaunchError(f"--env {name}: the launcher sets it for each process; leave it out")


@dataclasses.dataclass(frozen=True)
class ProcessCommand:
    """One process: its command line, and the environment variables that it needs."""

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
        ProcessCommand((*spec.program, *spec.arguments), _environment(spec, node, local))
        for node in range(len(spec.hosts))
        for local in range(spec.processes_per_host)
    ]


def share_of(spec: LaunchSpec, node: int) -> list[ProcessCommand]:
    """The processes of the host of this number."""
    first = node * spec.processes_per_host
    return commands(spec)[first : first + spec.processes_per_host]


def cpu_devices(count: int | None) -> dict[str, str]:
    """The variables with which a process creates `count` CPU devices; none if jax chooses."""
    return {} if count is None else {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(count)}


def _environment(spec: LaunchSpec, node: int, local: int) -> dict[str, str]:
    environment = {
        "RANK": str(node * spec.processes_per_host + local),
        "WORLD_SIZE": str(len(spec.hosts) * spec.processes_per_host),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(spec.processes_per_host),
        "NODE_RANK": str(node),
        "MASTER_ADDR": spec.hosts[0],
        "MASTER_PORT": str(spec.port),
    }
    if len(spec.hosts) > 1:
        environment["OPENPI_TRAIN_HOSTS"] = ",".join(spec.hosts)  # so that waits can name missing hosts
    if spec.restart:
        environment[RESTART_VARIABLE] = str(spec.restart)
    if spec.saved_step:
        environment[SAVED_STEP_VARIABLE] = str(spec.saved_step)
    token = {"OPENPI_TRAIN_JOB_TOKEN": spec.token} if spec.token else {}
    return {**environment, **cpu_devices(spec.devices_per_process), **token}
