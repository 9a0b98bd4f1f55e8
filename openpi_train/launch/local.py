"""`launch local`: all processes of a run on this machine. Read next: `processes.py`, which watches over them."""

import argparse
import secrets
from typing import Any

from openpi_train.launch.processes import add_options, free_port, start
from openpi_train.launch.spec import LaunchSpec, commands


def add_parser(forms: Any) -> None:
    """Add this form to the `launch` verb's."""
    parser = forms.add_parser("local", help="all processes on this machine")
    parser.add_argument("--processes", type=int, required=True, help="number of processes")
    parser.add_argument("--port", type=int, help="coordinator's port; it and the next (default: free ones)")
    add_options(parser)
    parser.set_defaults(launch=launch)


def launch(given: argparse.Namespace, arguments: tuple[str, ...]) -> int:
    """Start them, and return the exit code of the run."""
    spec = LaunchSpec(
        arguments=arguments,
        processes_per_host=given.processes,
        port=given.port or free_port(),
        devices_per_process=given.devices_per_process,
        token="" if given.dry_run else secrets.token_hex(8),  # lines to type by hand need none
    )
    return start(commands(spec), dry_run=given.dry_run, log_dir=given.log_dir, grace_s=given.grace_s)
