"""The words of openpi's `serve_policy.py` and `compute_norm_stats.py` as those of `serve` and `stats`.

Its training command line needs no translation: the flags have the same names. Read next: `cli.py`.
"""

import itertools
import shlex
import sys
from collections.abc import Mapping, Sequence

from openpi_train.runtime.exits import UsageError

# A flag of openpi's, and ours; empty: its value is the verb's first word.
_SERVE = {"--policy.config": "--experiment", "--policy.dir": "", "--default-prompt": "--prompt"}
_STATS = {"--config-name": ""}


def serve_words(argv: Sequence[str]) -> list[str]:
    """The words of `serve`, for `policy:checkpoint --policy.config NAME --policy.dir DIR`; told if they differ.

    Raises UsageError for `policy:default`, which names no checkpoint.
    """
    if "policy:default" in argv:
        raise UsageError("policy:default: name the checkpoint and its experiment, serve DIR --experiment NAME")
    return _told("serve", argv, _translated([word for word in argv if word != "policy:checkpoint"], _SERVE))


def stats_words(argv: Sequence[str]) -> list[str]:
    """The words of `stats`, for `--config-name NAME`; told if they differ."""
    return _told("stats", argv, _translated(argv, _STATS))


def _translated(argv: Sequence[str], flags: Mapping[str, str]) -> list[str]:
    first, rest, words = [], [], iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        ours = flags.get(flag.replace("_", "-"))
        if ours is None:
            rest.append(word)
            continue
        given = [value] if equals else list(itertools.islice(words, 1))
        if ours:
            rest += [ours, *given]
        else:
            first += given
    return [*first, *rest]


def _told(verb: str, argv: Sequence[str], words: list[str]) -> list[str]:
    if words != list(argv):
        print(f"openpi's words are taken as: python -m openpi_train {verb} {shlex.join(words)}", file=sys.stderr)
    return words
