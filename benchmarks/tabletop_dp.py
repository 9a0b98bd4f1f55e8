"""A diffusion policy from images, on the tabletop's easiest task: success rate in held-out initial states by step.

Read next: `closed_loop.py`, `configs/tabletop_runs.py`.
"""

import argparse
from collections.abc import Sequence

from benchmarks import closed_loop
from benchmarks.report import Table

STUDY = closed_loop.Study(
    experiment="tabletop_dp",
    dataset="tabletop_reach_red",
    tasks=("reach_red",),
    episodes_per_task=1_000,
    target=0.8,
    # Compiles in a fraction of the time.
    quick_flags=(
        *("--model.denoiser", "mlp", "--model.mlp.width", "32", "--model.mlp.depth", "1"),
        *("--model.encoder-widths", "16"),
    ),
)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line."""
    return closed_loop.parse("tabletop_dp", __doc__, STUDY, argv)


def main(argv: Sequence[str]) -> list[Table]:
    """Run the benchmark and return its tables."""
    flags, rest = parse(argv)
    with closed_loop.folder(flags) as out:
        return [closed_loop.measure("Diffusion policy from images: tabletop, one task", STUDY, flags, rest, out)]
