#!/usr/bin/env python
"""The older tools' way to start a run; a thin door to `python -m openpi_train launch`.

    python scripts/run_distributed.py --mode manual --world-size 4 -- pi0_bridge_traj --exp-name x

Without --rank it starts this host's processes and watches over them, as `launch local` (one host) and `launch manual`
(several) do. With --rank it becomes that one process. Nothing is added to what follows "--".
"""

import argparse
import os
import sys
from pathlib import Path

# Also from a checkout that is not installed, like `python -m` from its root.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from openpi_train.launch import cli
from openpi_train.launch.spec import DEFAULT_PORT, LaunchError, ProcessCommand


def main(argv: list[str]) -> int:
    options, arguments = cli.split_arguments(argv)
    given = _parser().parse_args(options)
    try:
        if given.rank is not None:
            return _one_process(given, arguments)
        return cli.main([*_launch(given), "--", *arguments])
    except LaunchError as error:
        sys.stderr.write(f"run_distributed: {error}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    environ = os.environ
    parser = argparse.ArgumentParser(prog="run_distributed.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mode", choices=["manual"], default="manual")
    parser.add_argument("--world-size", type=int, default=environ.get("WORLD_SIZE"), help="processes on all hosts")
    parser.add_argument("--gpus-per-node", type=int, help="processes per host, a GPU each (default: all on this host)")
    parser.add_argument("--rank", type=int, help="be this one process instead of starting all of this host")
    parser.add_argument("--local-rank", type=int, help="its number on this host")
    parser.add_argument("--node-rank", type=int, default=environ.get("NODE_RANK", 0), help="this host (%(default)s)")
    parser.add_argument("--master-addr", default=environ.get("MASTER_ADDR"), help="address of host 0")
    parser.add_argument("--master-port", type=int, default=environ.get("MASTER_PORT"), help="a free port there")
    parser.add_argument("--devices-per-process", type=int, help="make so many CPU devices in each process")
    parser.add_argument("--dry-run", action="store_true", help="print the command lines, start nothing")
    return parser


def _launch(given: argparse.Namespace) -> list[str]:
    """The `launch` arguments that start this host's processes."""
    size = given.world_size
    if size is None:
        raise LaunchError("say how many processes the run has: --world-size 4")
    per_node = given.gpus_per_node or size
    if size % per_node:
        raise LaunchError(f"--world-size {size} is not a multiple of --gpus-per-node {per_node}")
    if per_node == size:
        words: list[object] = ["local", "--processes", size]
        words += ["--port", given.master_port] if given.master_port else []
    else:
        if given.master_addr is None:
            raise LaunchError(f"{size // per_node} hosts need --master-addr, the address of the first")
        words = ["manual", "--node-rank", given.node_rank, "--num-nodes", size // per_node]
        words += ["--gpus-per-node", per_node, "--master-addr", given.master_addr]
        words += ["--master-port", given.master_port or DEFAULT_PORT]
    words += ["--devices-per-process", given.devices_per_process] if given.devices_per_process else []
    words += ["--dry-run"] if given.dry_run else []
    return [str(word) for word in words]


def _one_process(given: argparse.Namespace, arguments: tuple[str, ...]) -> int:
    """Become the process that --rank names."""
    local_rank = given.local_rank
    if local_rank is None and given.gpus_per_node:
        local_rank = given.rank % given.gpus_per_node
    variables = {
        "RANK": given.rank,
        "WORLD_SIZE": given.world_size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": given.gpus_per_node,
        "NODE_RANK": given.node_rank,
        "MASTER_ADDR": given.master_addr or "127.0.0.1",
        "MASTER_PORT": given.master_port or DEFAULT_PORT,
        "JAX_PLATFORMS": "cpu" if given.devices_per_process else None,
        "JAX_NUM_CPU_DEVICES": given.devices_per_process,
    }
    if given.world_size is None or not arguments:
        raise LaunchError("--rank needs --world-size, and after -- the experiment: `-- pi0_bridge_traj --exp-name x`")
    env = {name: str(value) for name, value in variables.items() if value is not None}
    command = ProcessCommand("", (sys.executable, "-m", "openpi_train", *arguments), env)
    if given.dry_run:
        print(command.line())
        return 0
    os.execve(command.argv[0], command.argv, {**os.environ, **command.env})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
