"""The help of an experiment: one page of the flags that most people use, then the others by part.

python -m openpi_train debug --help           # the page
python -m openpi_train debug --help model     # every flag of a part
python -m openpi_train debug --help-all       # every flag
"""

import argparse
import collections
import re
import sys
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

import tyro

WORDS = ("-h", "--help", "--help-all")
_PAGE = {
    "The run": "exp-name dataset data.mixture data.robot model.path num-train-steps num-epochs seed dry-run",
    "Learning": "batch-size optimizer lr-schedule.peak-lr lr-schedule.warmup-ratio ema-decay freeze",
    "Start weights, checkpoints": "weight-loader.params-path resume resume-from overwrite save-interval keep-last",
    "Devices and memory": "sharding.strategy grad-accum model.remat num-workers",
    "What is told": "log-interval eval.interval wandb-enabled profile",
}
_REST = "others"  # the part of flags without a dot


def show(kind: object, default: object, argv: Sequence[str], command: str, about: str) -> NoReturn:
    """Print what `argv` asks for of the flags of a `kind`, and exit with code 0."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # tyro warns of it, and has no other list of flags
        parser = tyro.extras.get_parser(cast(Any, kind), default=default)
    flags = {action.option_strings[0].removeprefix("--"): action for action in parser._actions if action.option_strings}
    flags.pop("-h", None)
    parts = collections.defaultdict(list)
    for name in flags:
        parts[name.partition(".")[0] if "." in name else _REST].append(name)
    asked = _part(argv)
    if asked is None:
        print(f"usage: python -m openpi_train {command} [--FLAG VALUE ...]\n")
        print(re.sub(r"\n{2,}", "\n", about.strip()))
        for title, names in _PAGE.items():
            print(f"\n{title}:")
            _print_flags({name: flags[name] for name in names.split() if name in flags}, whole=False)
        print(f"\nThe other flags by part, with --help PART; all {len(flags)} with --help-all:")
        print(textwrap.fill(", ".join(f"{part} ({len(names)})" for part, names in parts.items()), 118))
        sys.exit(0)
    if asked not in parts:
        print(f"--help {asked}: the parts are {', '.join(parts)}", file=sys.stderr)
        sys.exit(2)
    _print_flags({name: flags[name] for name in parts[asked]}, whole=True)
    sys.exit(0)


def _part(argv: Sequence[str]) -> str | None:
    """The word after `--help`, if it is no flag."""
    at = next(index for index, word in enumerate(argv) if word in WORDS)
    following = argv[at + 1 : at + 2]
    return following[0] if following and not following[0].startswith("-") else None


def _print_flags(flags: Mapping[str, argparse.Action], *, whole: bool) -> None:
    """Each flag with its values, and what it is for: `whole`, or the first sentence and the default."""
    for name, action in flags.items():
        print(f"  {'--' + name} {action.metavar or ''}".rstrip())
        text, _, default = str(action.help or "").rpartition(" (default: ")
        text = text or str(action.help or "")
        if not whole:  # the first sentence
            text = text.split(". ")[0].rstrip(".;") + "."
        if default:
            text += f" [{default.removesuffix(')')}]"
        for line in textwrap.wrap(text, 112):
            print(f"      {line}")
