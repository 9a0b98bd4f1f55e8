"""The `launch` verb and its launchers, one module each. A new launcher is a subclass of `Launch` listed in `LAUNCHERS`.

Standard library only. Read next: `options.py`, `spec.py`, then `slurm.py` as an example.
"""

import argparse
import difflib
import sys
from collections.abc import Sequence

from openpi_train.launch.kubernetes import Kubernetes
from openpi_train.launch.local import Local
from openpi_train.launch.manual import Manual
from openpi_train.launch.options import Launch, LaunchParser, add_options, read_options
from openpi_train.launch.slurm import Slurm
from openpi_train.launch.spec import LaunchError
from openpi_train.launch.ssh import Ssh

LAUNCHERS: tuple[type[Launch], ...] = (Local, Manual, Ssh, Slurm, Kubernetes)


def main(argv: Sequence[str]) -> int:
    """Run `launch <how> ... -- <experiment> ...` and return its exit code. `argv` begins with <how>."""
    options, arguments = split_arguments(argv)
    given, unknown = _parser().parse_known_args(options)
    try:
        if unknown:
            raise LaunchError(
                f"no such option: {' '.join(unknown)}{_closest(unknown, given.kind)}; what the processes are to run "
                "comes after --, as in `-- pi0_bridge_traj --exp-name x`, and `launch <how> --help` lists the options"
            )
        return read_options(given.kind, vars(given), arguments=arguments).launch()
    except LaunchError as error:
        sys.stderr.write(f"launch: {error}\n")
        return error.exit_code


def split_arguments(argv: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """The launcher's options and, after the first "--", what every process is to run."""
    at = list(argv).index("--") if "--" in argv else len(argv)
    return list(argv[:at]), tuple(argv[at + 1 :])


def _closest(unknown: Sequence[str], kind: type[Launch]) -> str:
    """The options that are nearest to unknown ones, in words; empty if none is near. Nothing is abbreviated."""
    known = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    add_options(known, kind)
    names = [name for action in known._actions for name in action.option_strings]
    found = [name for word in unknown if word.startswith("--") for name in _near(word.partition("=")[0], names)]
    return f" (did you mean {' or '.join(dict.fromkeys(found))}?)" if found else ""


def _near(word: str, names: Sequence[str]) -> list[str]:
    return [name for name in names if name.startswith(word)] or difflib.get_close_matches(word, names, n=1)


def _parser() -> LaunchParser:
    parser = LaunchParser(
        prog="python -m openpi_train launch",
        description="Start the processes of a run. Every process runs the command after --.",
        epilog="example: python -m openpi_train launch local --processes 4 -- pi0_bridge_traj_tiny --exp-name x",
    )
    names = {form.__name__.lower(): form for form in LAUNCHERS}
    forms = parser.add_subparsers(required=True, metavar="|".join(names))
    for name, form in names.items():
        # The first line of its docstring, as a help of argparse is written.
        line = (form.__doc__ or "").partition("\n")[0].removesuffix(".")
        added = forms.add_parser(name, help=line[:1].lower() + line[1:], allow_abbrev=False)
        add_options(added, form)
        added.set_defaults(kind=form)
    return parser
