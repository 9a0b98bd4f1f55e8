#!/usr/bin/env python3
"""The older tools' way to start a run; a thin door to `python -m openpi_train launch`.

    python scripts/run_distributed.py --mode manual --world-size 4 -- pi0_bridge_traj --exp-name x
    python scripts/run_distributed.py --mode create_slurm --num-nodes 2 --gpus-per-node 4 -- debug --exp-name x
    python scripts/run_distributed.py --nproc_per_node 4 --config config_distributed_example.yaml --algorithm sft

The last form is another tool's, for language models (`openpi_train/doors/posttraining/posttraining_launch.py`). Modes
of the first:

manual: without --rank it starts this host's processes and watches over them, as `launch local` (one host) and `launch
manual` (several) do; with --rank it becomes that one process. Nothing is added to what follows "--".
create_slurm: writes <output dir>/run_slurm.sh, as `launch slurm` does.
slurm: inside a Slurm job; a task of a step becomes its process, a batch script or salloc starts one task per process.
Both Slurm modes continue a run that is there (--resume), since a job may be requeued.
"""

import argparse
import os
import sys
from pathlib import Path

import checkout

checkout.ready()

from openpi_train.doors.posttraining import posttraining_launch
from openpi_train.launch import launchers
from openpi_train.launch.slurm import RANK_VARIABLES, resumed
from openpi_train.launch.spec import DEFAULT_PORT, LaunchError, ProcessCommand, cpu_devices
from openpi_train.runtime.closed_output import quietly
from openpi_train.runtime.world import in_slurm_step

# What the guide of the older tool starts where it names no experiment; `launch_multi_node.sh` has the same.
_DEFAULT_RUN = ("pi0_bridge_traj", "--exp-name", "multi_node_training")

# Where the guide looks for the log (`openpi_train/training/documented_links.py`).
_LINK = ("OPENPI_TRAIN_LINKS", "logs/training.log=logs/process_0.log")


def main(argv: list[str]) -> int:
    options, arguments = launchers.split_arguments(argv)
    try:
        if posttraining_launch.is_meant(options):
            return posttraining_launch.main(options, arguments)
        if {"-h", "--help"} & {*options}:
            print(f"{_parser().format_help()}\nor, as the launcher of a language model:\n", end="")
            print(posttraining_launch.help_text(), end="")
            return 0
        given = _parser().parse_args(options)
        os.environ.setdefault(*_LINK)
        if given.mode == "create_slurm":
            if not arguments:
                sys.stderr.write(f"run_distributed: no run is named, so this is: -- {' '.join(_DEFAULT_RUN)}\n")
            return launchers.main([*_create_slurm(given), "--", *(arguments or _DEFAULT_RUN)])
        if given.mode == "slurm":
            return _inside_slurm(given, arguments)
        if given.rank is not None:
            return _one_process(given, arguments)
        return launchers.main([*_launch(given), "--", *arguments])
    except LaunchError as error:
        sys.stderr.write(f"run_distributed: {error}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    environ = os.environ
    parser = posttraining_launch.DoorParser(prog="run_distributed.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mode", choices=["manual", "slurm", "create_slurm"], default="manual")
    parser.add_argument("--world-size", type=int, default=environ.get("WORLD_SIZE"), help="processes on all hosts")
    parser.add_argument("--gpus-per-node", type=int, help="processes per host, a GPU each (default: all on this host)")
    parser.add_argument("--rank", type=int, help="be this one process instead of starting all of this host")
    parser.add_argument("--local-rank", type=int, help="its number on this host")
    parser.add_argument("--node-rank", type=int, default=environ.get("NODE_RANK", 0), help="this host (%(default)s)")
    parser.add_argument("--master-addr", default=environ.get("MASTER_ADDR"), help="address of host 0")
    parser.add_argument("--master-port", type=int, default=environ.get("MASTER_PORT"), help="a free port there")
    parser.add_argument("--devices-per-process", type=int, help="make so many CPU devices in each process")
    parser.add_argument("--dry-run", action="store_true", help="print the command lines, start nothing")
    slurm = parser.add_argument_group("--mode create_slurm, besides --gpus-per-node; more in `launch slurm --help`")
    slurm.add_argument("--job-name", default="distributed_training")
    slurm.add_argument("--num-nodes", type=int, default=1, help="number of hosts (%(default)s)")
    slurm.add_argument("--time-limit", help="as Slurm writes it: 24:00:00")
    slurm.add_argument("--partition")
    slurm.add_argument("--no-check", action="store_true", help="write the file also if the run would not start")
    slurm.add_argument("--output-dir", default="slurm_scripts", help="for run_slurm.sh and output (%(default)s)")
    return parser


def _launch(given: argparse.Namespace) -> list[str]:
    """The `launch` arguments that start this host's processes."""
    size = given.world_size
    if size is None:
        raise LaunchError(
            f"say how many processes the run has: --world-size 4 (lines of other tools: {posttraining_launch.PAGE})"
        )
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


def _create_slurm(given: argparse.Namespace) -> list[str]:
    """The `launch` arguments that write run_slurm.sh."""
    words = ["slurm", "--job-name", given.job_name, "--nodes", given.num_nodes, "--output-dir", given.output_dir]
    words += ["--file", Path(given.output_dir) / "run_slurm.sh", "--env", "=".join(_LINK)]
    options = ("gpus_per_node", "devices_per_process", "time_limit", "partition")
    for name, value in ((name, getattr(given, name)) for name in options):
        words += [f"--{name.replace('_', '-')}", value] if value is not None else []
    words += ["--dry-run"] if given.dry_run else []
    words += ["--no-check"] if given.no_check else []
    return [str(word) for word in words]


def _inside_slurm(given: argparse.Namespace, arguments: tuple[str, ...]) -> int:
    """Become the process of this task, or start one task per process."""
    if "SLURM_JOB_ID" not in os.environ:
        raise LaunchError("this is no Slurm job: use sbatch or salloc first, or --mode create_slurm to write a job")
    program = [sys.executable, "-m", "openpi_train", *resumed(arguments or _DEFAULT_RUN)]
    if not in_slurm_step(os.environ):
        counts = {"--ntasks": given.world_size, "--ntasks-per-node": given.gpus_per_node}
        words = [word for name, value in counts.items() if value for word in (name, str(value))]
        program = ["srun", "--kill-on-bad-exit=1", "--label", *words, *program]
    command = ProcessCommand(tuple(program), cpu_devices(given.devices_per_process or None))
    if given.dry_run:
        print(command.line())
        return 0
    # Slurm says who is who; what a shell has set for the manual mode must not.
    environ = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    os.execvpe(command.argv[0], command.argv, {**environ, **command.env})


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
    }
    if given.world_size is None or not arguments:
        raise LaunchError("--rank needs --world-size, and after -- the experiment: `-- pi0_bridge_traj --exp-name x`")
    env = {name: str(value) for name, value in variables.items() if value is not None}
    env |= cpu_devices(given.devices_per_process or None)
    command = ProcessCommand((sys.executable, "-m", "openpi_train", *arguments), env)
    if given.dry_run:
        print(command.line())
        return 0
    os.execve(command.argv[0], command.argv, {**os.environ, **command.env})


if __name__ == "__main__":
    sys.exit(quietly(lambda: main(sys.argv[1:])))
