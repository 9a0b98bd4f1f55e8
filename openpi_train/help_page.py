"""The help of an experiment: one page of the flags that most people use, then the others by part.

    python -m openpi_train debug --help           # the page
    python -m openpi_train debug --help model     # every flag of a part
    python -m openpi_train debug --help-all       # every flag, by tyro

Read next: `experiment_flags.py`.
"""

import argparse
import collections
import re
import sys
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, cast

import tyro

from openpi_train.runtime.exits import DONE, USAGE

_PAGE = {
    "The run": "exp-name dataset data.mixture data.robot model.path reward num-train-steps num-epochs seed dry-run",
    "Learning": "batch-size optimizer lr-schedule.peak-lr lr-schedule.warmup-ratio ema-decay freeze",
    "Start weights, checkpoints": "weight-loader.params-path resume resume-from overwrite save-interval keep-last",
    "Devices and memory": "sharding.strategy grad-accum model.remat num-workers",
    "What is told": "log-interval eval.interval wandb-enabled profile",
}
_REST = "others"  # the part of flags without a dot


def show(kind: object, default: object, following: Sequence[str], command: str, about: str) -> None:
    """Print the page of the flags of a `kind`, or the part that the words `following` `--help` name, and exit.

    Returns if tyro has no list of flags any more: the version that this was written with says that it will go.
    """
    if not hasattr(tyro.extras, "get_parser"):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        parser = tyro.extras.get_parser(cast(Any, kind), default=default)
    flags = {action.option_strings[0].removeprefix("--"): action for action in parser._actions if action.option_strings}
    flags.pop("-h", None)
    parts = collections.defaultdict(list)
    for name in flags:
        parts[name.partition(".")[0] if "." in name else _REST].append(name)
    asked = next((word for word in following[:1] if not word.startswith("-")), None)
    if asked is None:
        print(f"usage: python -m openpi_train {command} [--FLAG VALUE ...]\n")
        print(re.sub(r"\n{2,}", "\n", about.strip()))
        for title, names in _PAGE.items():
            print(f"\n{title}:")
            _print_flags({name: flags[name] for name in names.split() if name in flags}, whole=False)
        print(f"\nThe other flags by part, with --help PART; all {len(flags)} with --help-all:")
        print(textwrap.fill(", ".join(f"{part} ({len(names)})" for part, names in parts.items()), 118))
    elif asked in parts:
        _print_flags({name: flags[name] for name in parts[asked]}, whole=True)
    else:
        print(f"error: --help {asked}: the parts are {', '.join(parts)}", file=sys.stderr)
        sys.exit(USAGE)
    sys.exit(DONE)


def _print_flags(flags: Mapping[str, argparse.Action], *, whole: bool) -> None:
    """Each flag with its values, and what it is for: `whole`, or the first sentence and the default."""
    for name, action in flags.items():
        print(f"  {'--' + name} {action.metavar or ''}".rstrip())
        text, _, default = str(action.help or "").rpartition(" (default: ")
        text = (text or str(action.help or "")).replace("%%", "%")  # argparse would format it
        if not whole:  # the first sentence
            text = text.split(". ")[0].rstrip(".;") + "."
        if default:
            text += f" [{default.removesuffix(')')}]"
        for line in textwrap.wrap(text, 112):
            print(f"      {line}")
