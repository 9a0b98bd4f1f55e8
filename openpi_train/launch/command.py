"""The `launch` verb and its forms, one module each. Read next: `spec.py`. Standard library only, never jax."""

import argparse
import sys
from collections.abc import Sequence

from openpi_train.launch import kubernetes, local, manual, slurm, ssh
from openpi_train.launch.spec import LaunchError

_USAGE_ERROR = 2
FORMS = (local, manual, ssh, slurm, kubernetes)


def main(argv: Sequence[str]) -> int:
    """Run `launch <how> ... -- <experiment> ...` and return its exit code. `argv` begins with <how>."""
    options, arguments = split_arguments(argv)
    given, unknown = _parser().parse_known_args(options)
    try:
        if unknown:
            raise LaunchError(
                f"no such option: {' '.join(unknown)}; what the processes are to run comes after --, as in "
                "`-- pi0_bridge_traj --exp-name x`, and `launch <how> --help` lists the options"
            )
        return given.launch(given, arguments)
    except LaunchError as error:
        sys.stderr.write(f"launch: {error}\n")
        return _USAGE_ERROR


def split_arguments(argv: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """The launcher's options and, after the first "--", what every process is to run."""
    if "--" not in argv:
        return list(argv), ()
    at = list(argv).index("--")
    return list(argv[:at]), tuple(argv[at + 1 :])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="openpi-train launch",
        description="Start the processes of a run. What follows -- is what every process runs.",
        epilog="example: openpi-train launch local --processes 4 -- pi0_bridge_traj_tiny --exp-name x",
    )
    forms = parser.add_subparsers(required=True, metavar="|".join(form.__name__.rpartition(".")[2] for form in FORMS))
    for form in FORMS:
        form.add_parser(forms)
    return parser
