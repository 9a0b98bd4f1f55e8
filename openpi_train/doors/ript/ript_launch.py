"""The launcher of the RIPT trainers for pi0, `launch_distributed_training.sh`: its options as those of `launch`.

Read next: `this_host.py`, `scripts/launch_distributed_training.sh`.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from openpi_train import faults
from openpi_train.doors import guide_files
from openpi_train.doors.this_host import this_host
from openpi_train.launch import launchers
from openpi_train.launch.options import LaunchParser
from openpi_train.launch.spec import LaunchError

_PROGRAM = "launch_distributed_training.sh"
# What the tool's script has where nothing is given.
_GPUS, _PORT, _DEBUG_CONFIG = 4, 12355, "pi0/ript/config/debug_distributed_train.yaml"
# Device files of GPUs (NVIDIA, AMD, those of WSL) and of TPUs.
_ACCELERATORS = ("nvidia[0-9]*", "kfd", "dxg", "accel[0-9]*", "vfio/[0-9]*")


def main(argv: Sequence[str], devices: Path = Path("/dev")) -> int:
    """Start the processes of this host; what follows `--` goes to `ript`. Returns the exit code.

    Where `devices` has no accelerator, each process has one CPU device in place of its GPU.
    """
    options, arguments = launchers.split_arguments(argv)
    given = _parser().parse_args(options)
    try:
        words = _words(given, has_accelerator(devices))
    except LaunchError as error:
        sys.stderr.write(f"{_PROGRAM}: {error}\n")
        return faults.USAGE
    if given.debug:
        os.environ.setdefault("NCCL_DEBUG", "INFO")
    return launchers.main([*words, *arguments])


def has_accelerator(devices: Path) -> bool:
    """Whether there is a device file of a GPU or a TPU in this folder."""
    return any(found for pattern in _ACCELERATORS for found in devices.glob(pattern))


def _words(given: argparse.Namespace, has_gpus: bool) -> list[str]:
    config = given.config or (_DEBUG_CONFIG if given.debug else None)
    if config is None:
        raise LaunchError("--config FILE is missing: the YAML config")
    config = config if given.dry_run else guide_files.required(config)
    if not has_gpus:
        sys.stderr.write(f"{_PROGRAM}: there is no GPU here; --gpus {given.gpus}: processes with a CPU device each\n")
    share = this_host(
        processes=given.gpus,
        num_hosts=given.nodes,
        host=given.node_rank,
        master_addr=given.master_addr,
        master_port=given.master_port,
        default_port=_PORT,
        addr_option="--master-addr",
        devices_per_process=None if has_gpus else 1,
        log_dir=given.log_dir,
        dry_run=given.dry_run,
    )
    return [*share, "--", "ript", "--config", config]


def _parser() -> argparse.ArgumentParser:
    parser = LaunchParser(
        prog=_PROGRAM,
        description="Let a robot policy learn from its own episodes by a YAML config, on several GPUs or hosts.",
        epilog="What follows -- are flags of the experiment, which take precedence over the config.",
    )
    parser.add_argument("-c", "--config", help="the YAML config")
    parser.add_argument(
        "-g", "--gpus", type=int, default=_GPUS, help="processes on this host, a GPU each (%(default)s)"
    )
    parser.add_argument("-n", "--nodes", type=int, default=1, help="number of hosts (%(default)s)")
    parser.add_argument("-r", "--node-rank", type=int, default=0, help="this host (%(default)s)")
    parser.add_argument("-m", "--master-addr", help="address of host 0")
    parser.add_argument("-p", "--master-port", type=int, help=f"a free port there ({_PORT} for several hosts)")
    parser.add_argument("--debug", action="store_true", help=f"NCCL_DEBUG=INFO; without --config: {_DEBUG_CONFIG}")
    parser.add_argument("--log-dir", help="folder for the processes' output (default: a temporary one)")
    parser.add_argument("--dry-run", action="store_true", help="print the command lines, start nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
