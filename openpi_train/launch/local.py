"""`launch local`: all processes of a run on this machine. Read next: `processes.py`, which watches over them."""

import dataclasses
import os
import secrets
from typing import Any

from openpi_train.launch.options import Here, Launch, option
from openpi_train.launch.processes import LaunchOutcome, announced, free_port, run, show
from openpi_train.launch.spec import LaunchError, LaunchSpec, commands
from openpi_train.launch.supervise import Rules, Start, max_restarts_option, supervise


@dataclasses.dataclass(frozen=True, kw_only=True)
class Local(Launch):
    """All processes on this machine."""

    processes: int = option("number of processes")
    port: int | None = option("coordinator's port (default: that of MASTER_PORT, else a free one)", None)
    max_restarts: int = max_restarts_option()
    here: Here

    def launch(self) -> int:
        """Start the processes, with restarts if requested, and return the exit code of the run."""
        spec = LaunchSpec(
            arguments=self.arguments,
            processes_per_host=self.processes,
            port=self._port(),
            devices_per_process=self.here.devices_per_process,
        )
        if self.here.dry_run:
            return show(commands(spec))  # command lines typed by hand need no token
        log_dir = announced(self.processes, self.here.log_dir)

        def begin(start: Start) -> LaunchOutcome:
            own: dict[str, Any] = {"port": self._port(), "token": secrets.token_hex(16)}
            own |= {"arguments": start.arguments, "restart": start.number, "saved_step": start.saved_step}
            share = commands(dataclasses.replace(spec, **own))
            return run(share, start.log_dir(log_dir), self.here.grace_s)

        return supervise(begin, Start(arguments=self.arguments), Rules(max_restarts=self.max_restarts))

    def _port(self) -> int:
        """The coordinator's port. Raises LaunchError if MASTER_PORT is none."""
        said = os.environ.get("MASTER_PORT")
        if self.port is not None or not said or "RANK" in os.environ:  # a process of another run has that run's
            return self.port or free_port()
        if not said.isdecimal() or not 0 < int(said) < 2**16:
            raise LaunchError(f"MASTER_PORT is {said!r}; it must be a port, such as 29500 (or give --port)")
        return int(said)
