"""The `launch` verb: `launch local` and `launch manual`. Read next: `spec.py`. Standard library only, never jax."""

import argparse
import secrets
import shlex
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from openpi_train.launch import local
from openpi_train.launch.spec import LaunchError, LaunchSpec, ProcessCommand, commands

_USAGE_ERROR = 2
DEFAULT_PORT = 29500


def main(argv: Sequence[str]) -> int:
    """Run `launch <how> ... -- <experiment> ...` and return its exit code. `argv` begins with <how>."""
    options, arguments = split_arguments(argv)
    given = _parser().parse_args(options)
    try:
        return given.start(given, arguments)
    except LaunchError as error:
        sys.stderr.write(f"launch: {error}\n")
        return _USAGE_ERROR


def split_arguments(argv: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """The launcher's options and, after the first "--", what every process is to run."""
    if "--" not in argv:
        return list(argv), ()
    at = list(argv).index("--")
    return list(argv[:at]), tuple(argv[at + 1 :])


def start(share: Sequence[ProcessCommand], *, dry_run: bool, log_dir: Path | None, grace_s: float) -> int:
    """Start this machine's `share` of a run, or with `dry_run` only print it; returns the exit code."""
    if dry_run:
        for command in share:
            print(command.line())
        return 0
    log_dir = log_dir or Path(tempfile.mkdtemp(prefix="openpi_train_launch_"))
    count = "1 process" if len(share) == 1 else f"{len(share)} processes"
    print(f"starting {count}; all that each writes: {log_dir}/process_<k>.txt", flush=True)
    return local.run(share, log_dir, grace_s)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="openpi-train launch",
        description="Start the processes of a run. What follows -- is what every process runs.",
        epilog="example: openpi-train launch local --processes 4 -- pi0_bridge_traj_tiny --exp-name x",
    )
    how = parser.add_subparsers(required=True, metavar="local|manual")
    one = how.add_parser("local", help="all processes on this machine")
    one.add_argument("--processes", type=int, required=True, help="number of processes")
    one.add_argument("--port", type=int, help="coordinator's port; it and the next must be free (default: a free one)")
    one.set_defaults(start=_local)
    many = how.add_parser("manual", help="this machine's share; run it on every host of the run")
    many.add_argument("--node-rank", type=int, required=True, help="this host, from 0 to the number of hosts - 1")
    many.add_argument("--num-nodes", type=int, required=True, help="number of hosts")
    many.add_argument("--master-addr", required=True, help="address of host 0, which all hosts can reach")
    many.add_argument("--master-port", type=int, default=DEFAULT_PORT, help="coordinator's port there (%(default)s)")
    count = many.add_mutually_exclusive_group(required=True)
    count.add_argument("--gpus-per-node", type=int, help="one process for each of so many GPUs per host")
    count.add_argument("--processes-per-node", type=int, help="processes per host; they share its GPUs equally")
    many.add_argument("--job-token", default="", help="a word, the same on all hosts, that keeps other jobs out")
    many.set_defaults(start=_manual)
    for form in (one, many):
        form.add_argument(
            "--devices-per-process", type=int, help="make so many CPU devices in each process, use no GPU"
        )
        form.add_argument("--dry-run", action="store_true", help="print the processes' command lines, start nothing")
        form.add_argument("--log-dir", type=Path, help="folder for the processes' output (default: a temporary one)")
        form.add_argument(
            "--grace-s", type=float, default=15.0, help="time to end after another failed (%(default)s s)"
        )
    return parser


def _local(given: argparse.Namespace, arguments: tuple[str, ...]) -> int:
    spec = LaunchSpec(
        arguments=arguments,
        processes_per_host=given.processes,
        port=given.port or free_port(),
        devices_per_process=given.devices_per_process,
        token="" if given.dry_run else secrets.token_hex(8),  # lines to type by hand need none
    )
    return start(commands(spec), dry_run=given.dry_run, log_dir=given.log_dir, grace_s=given.grace_s)


def _manual(given: argparse.Namespace, arguments: tuple[str, ...]) -> int:
    if not 0 <= given.node_rank < given.num_nodes:
        raise LaunchError(
            f"--node-rank {given.node_rank} is not from 0 to {given.num_nodes - 1} (--num-nodes less one)"
        )
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
            print(f"on host {node}: {_manual_line(given, node, arguments)}", flush=True)
    share = [command for command in commands(spec) if command.env["NODE_RANK"] == str(given.node_rank)]
    return start(share, dry_run=given.dry_run, log_dir=given.log_dir, grace_s=given.grace_s)


def _manual_line(given: argparse.Namespace, node: int, arguments: tuple[str, ...]) -> str:
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


def free_port() -> int:
    """A port that is free on this machine together with the next one."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
                return port
            except (OSError, OverflowError):
                continue
