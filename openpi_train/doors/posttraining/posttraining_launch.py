"""The launcher of the PyTorch post-training tool: its options as those of `launch local` and `launch manual`.

Read next: `this_host.py`.
"""

import argparse
import shlex
from collections.abc import Sequence
from typing import NoReturn

from openpi_train import faults
from openpi_train.doors import guide_files
from openpi_train.doors.this_host import this_host
from openpi_train.launch import launchers
from openpi_train.launch.options import LaunchParser
from openpi_train.launch.spec import DEFAULT_PORT

# Options of `posttrain` that replace the config's values.
_REPLACING = ("output_dir", "experiment_name", "resume_from_checkpoint")
PAGE = "docs/howto/hosts.md"
# Options that the older tool's `--mode` form has, too.
_OF_BOTH = ("--node-rank", "--master-addr", "--master-port", "--devices-per-process", "--dry-run", "--output-dir")


class DoorParser(LaunchParser):
    """Names the page with the launch lines of other tools where an option is none of ours."""

    def error(self, message: str) -> NoReturn:
        told = f"{self.prog}: {message}\nthe launch lines of other tools, and what they are here: {PAGE}\n"
        self.exit(faults.USAGE, told)


def is_meant(options: Sequence[str]) -> bool:
    """Whether these are options of that tool's launcher."""
    names = {name for action in _parser()._actions for name in action.option_strings}
    own = names.difference(_OF_BOTH, ("-h", "--help"))
    return any(word.partition("=")[0] in own for word in options)


def help_text() -> str:
    """The launcher's help."""
    return _parser().format_help()


def main(options: Sequence[str], arguments: Sequence[str] = ()) -> int:
    """Start the processes of this host; `arguments` go to `posttrain`. Returns the exit code.

    Raises LaunchError if an option is missing.
    """
    given = _parser().parse_args(list(options))
    started = _started(given)
    config = given.config if given.dry_run else guide_files.required(given.config)
    words = ["posttrain", "--config", config, "--mode", "train"]
    for name in ("algorithm", *_REPLACING):
        words += [f"--{name}", value] if (value := getattr(given, name)) is not None else []
    return launchers.main([*started, "--", *words, *shlex.split(given.extra_args), *arguments])


def _started(given: argparse.Namespace) -> list[str]:
    return this_host(
        # A process without GPUs of its own uses all of its host.
        processes=given.nproc_per_node or 1,
        num_hosts=given.nnodes,
        host=given.node_rank,
        master_addr=given.master_addr,
        master_port=given.master_port,
        default_port=DEFAULT_PORT,
        addr_option="--master_addr",
        devices_per_process=given.devices_per_process,
        log_dir=given.log_dir,
        dry_run=given.dry_run,
    )


def _parser() -> argparse.ArgumentParser:
    parser = DoorParser(
        prog="run_distributed.py", description="Train a language model by a YAML config, on several GPUs or hosts."
    )
    parser.add_argument("--config", required=True, help="the YAML config")
    parser.add_argument("--algorithm", help="sft, rm, dpo, ppo or grpo (default: as the config says)")
    for name in _REPLACING:
        _add(parser, name, help="replaces the config's value")
    _add(parser, "nproc_per_node", type=int, help="processes on this host, a GPU each (default: one with all GPUs)")
    _add(parser, "nnodes", type=int, default=1, help="number of hosts (%(default)s)")
    _add(parser, "node_rank", type=int, default=0, help="this host (%(default)s)")
    _add(parser, "master_addr", help="address of host 0")
    _add(parser, "master_port", type=int, help=f"a free port there ({DEFAULT_PORT} for several hosts)")
    _add(parser, "use_torchrun", action="store_true", help="no effect: there is one launcher")
    _add(parser, "backend", choices=["nccl", "gloo"], help="no effect: NCCL on GPUs, gloo on CPUs")
    _add(parser, "extra_args", default="", help="further options of `posttrain`, in one word")
    _add(parser, "devices_per_process", type=int, help="make so many CPU devices in each process")
    _add(parser, "log_dir", help="folder for the processes' output (default: a temporary one)")
    _add(parser, "dry_run", action="store_true", help="print the command lines, start nothing")
    return parser


def _add(parser: argparse.ArgumentParser, name: str, **settings: object) -> None:
    """An option with underscores, as the tool has it, or with dashes."""
    flags = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
    parser.add_argument(*flags, **settings)  # pyright: ignore[reportArgumentType]
