"""`launch local`: all processes of a run on this machine. Read next: `processes.py`, which watches over them."""

import argparse
import dataclasses
import secrets
from typing import Any

from openpi_train.launch import supervise
from openpi_train.launch.processes import Outcome, add_options, announced, free_port, run, show
from openpi_train.launch.spec import LaunchSpec, commands
from openpi_train.launch.supervise import Rules, Start


def add_parser(forms: Any) -> None:
    """Add this form to the `launch` verb's."""
    parser = forms.add_parser("local", help="all processes on this machine")
    parser.add_argument("--processes", type=int, required=True, help="number of processes")
    parser.add_argument("--port", type=int, help="coordinator's port; it and the next (default: free ones)")
    supervise.add_option(parser)
    add_options(parser)
    parser.set_defaults(launch=launch)


def launch(given: argparse.Namespace, arguments: tuple[str, ...]) -> int:
    """Start them, as often as asked, and return the exit code of the run."""
    spec = LaunchSpec(
        arguments=arguments,
        processes_per_host=given.processes,
        port=given.port or free_port(),
        devices_per_process=given.devices_per_process,
    )
    if given.dry_run:
        return show(commands(spec))  # lines to type by hand need no token
    log_dir = announced(given.processes, given.log_dir)

    def begin(start: Start) -> Outcome:
        own = {"port": given.port or free_port(), "token": secrets.token_hex(8)}
        share = commands(dataclasses.replace(spec, arguments=start.arguments, **own))
        return run(share, start.log_dir(log_dir), given.grace_s)

    return supervise.supervise(begin, Start(arguments=arguments), Rules(max_restarts=given.max_restarts))
