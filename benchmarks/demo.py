"""What `make demo` runs: a small pi0 learns the tabletop's easiest tasks, told in words, in about 10 CPU minutes.

Read next: `closed_loop.py`, `configs/tabletop.py`.
"""

import argparse
from collections.abc import Sequence

from benchmarks import closed_loop
from benchmarks.report import Table

STUDY = closed_loop.Study(
    experiment="pi0_tabletop_reach",
    dataset="tabletop_reach",
    tasks=("reach_red", "reach_blue"),
    episodes_per_task=1_000,
    target=0.6,
    quick_flags=("--model.language.depth", "1", "--model.action-expert.depth", "1", "--model.siglip.depth", "1"),
)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The command line, understood."""
    return closed_loop.parse("demo", __doc__, STUDY, argv)


def main(argv: Sequence[str]) -> list[Table]:
    """Measure as the flags say."""
    return [closed_loop.measure("Demo: a small pi0 on the tabletop's easiest tasks", STUDY, *parse(argv))]
