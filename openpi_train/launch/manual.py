"""`launch manual`: this machine's share of a run on several hosts, started by hand on each.

Read next: `processes.py`.
"""

import argparse
import shlex
from typing import Any

from openpi_train.launch.processes import add_options, add_per_node_options, start
from openpi_train.launch.spec import DEFAULT_PORT, LaunchError, LaunchSpec, commands


def add_parser(forms: Any) -> None:
    """Add this form to the `launch` verb's."""
    parser = forms.add_parser("manual", help="this machine's share; run it on every host of the run")
    parser.add_argument("--node-rank", type=int, required=True, help="this host, from 0 to the number of hosts - 1")
    parser.add_argument("--num-nodes", type=int, required=True, help="number of hosts")
    parser.add_argument("--master-addr", required=True, help="address of host 0, which all hosts can reach")
    parser.add_argument("--master-port", type=int, default=DEFAULT_PORT, help="coordinator's port there (%(default)s)")
    add_per_node_options(parser)
    parser.add_argument("--job-token", default="", help="a word, the same on all hosts, that keeps other jobs out")
    add_options(parser)
    parser.set_defaults(launch=launch)


def launch(given: argparse.Namespace, arguments: tuple[str, ...]) -> int:
    """Start this machine's share, say what to type on the others, and return the exit code of the share."""
    if not 0 <= given.node_rank < given.num_nodes:
        raise LaunchError(
            f"--node-rank {given.node_rank} is not from 0 to {given.num_nodes - 1} (--num-nodes less one)"
        )
    if not given.master_addr.strip():
        raise LaunchError("--master-addr is empty: give the address of host 0, which all hosts can reach")
    spec = LaunchSpec(
        arguments=arguments,
        processes_per_host=given.gpus_per_node or given.processes_per_node,
        hosts=(given.master_addr, *(f"host {node}" for node in range(1, given.num_nodes))),
        port=given.master_port,
        devices_per_process=given.devices_per_process,
        token=given.job_token,
    )
    for node in range(given.num_nodes):
        if node != given.node_rank:
            print(f"on host {node}: {_line(given, node, arguments)}", flush=True)
    share = [command for command in commands(spec) if command.env["NODE_RANK"] == str(given.node_rank)]
    return start(share, dry_run=given.dry_run, log_dir=given.log_dir, grace_s=given.grace_s)


def _line(given: argparse.Namespace, node: int, arguments: tuple[str, ...]) -> str:
    """What to type on another host to start its share of the same run."""
    options = {
        "--node-rank": node,
        "--num-nodes": given.num_nodes,
        "--master-addr": given.master_addr,
        "--master-port": given.master_port,
        "--gpus-per-node": given.gpus_per_node,
        "--processes-per-node": given.processes_per_node,
        "--devices-per-process": given.devices_per_process,
        "--job-token": given.job_token or None,
    }
    words = [word for name, value in options.items() if value is not None for word in (name, str(value))]
    return shlex.join(["python", "-m", "openpi_train", "launch", "manual", *words, "--", *arguments])
