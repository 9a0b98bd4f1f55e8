"""The `data` verb: `prepare` the embedded dataset, build an `index`, `repack` for slow storage.

Read next: `prepare.py`, `data/rlds/index.py`, `data/repack.py`.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from openpi_train.runtime import logs
from openpi_train.runtime.exits import DataError, reported_as


def main(argv: Sequence[str]) -> int:
    """Run `data <what> ...`. Returns the exit code; raises DataError with advice."""
    given = _parser().parse_args(argv)
    logs.configure(0)
    with reported_as(DataError):
        given.run(given)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m openpi_train data", description="Make and look after datasets.")
    what = parser.add_subparsers(required=True, metavar="prepare|index|repack")
    prepare = what.add_parser("prepare", help="write the embedded tabletop dataset and its tokenizer")
    prepare.add_argument("--directory", type=Path, help="datasets' folder (default: $OPENPI_TRAIN_HOME/datasets)")
    prepare.add_argument("--episodes-per-task", type=int, default=24, help="training episodes (%(default)s)")
    prepare.add_argument("--val-episodes-per-task", type=int, default=4, help="held-out episodes (%(default)s)")
    prepare.add_argument("--image-size", type=int, default=64, help="pixels of a side (%(default)s)")
    prepare.add_argument("--seed", type=int, default=0, help="of scenes and disturbances (%(default)s)")
    prepare.set_defaults(run=_prepare)
    index = what.add_parser("index", help="index a dataset now rather than at the first run")
    repack = what.add_parser("repack", help="copy a dataset of pictures into step-level records for slow storage")
    for form in (index, repack):
        form.add_argument(
            "path", help="<data_dir>/<name>[/<version>] of RLDS; the folder of a LeRobot dataset or a zarr store"
        )
        form.add_argument("--split", default="train", help='of RLDS a split, or several as "train+val" (%(default)s)')
        form.add_argument(
            "--on-bad-record",
            choices=("error", "skip"),
            default="error",
            help="what a torn record does: end this, or have its episode left out (%(default)s)",
        )
    index.set_defaults(run=_index)
    repack.add_argument("out", type=Path, help="directory to make")
    repack.set_defaults(run=_repack)
    return parser


def _prepare(given: argparse.Namespace) -> None:
    import jax

    from openpi_train.tools.prepare import prepare

    # It simulates on the CPU; a GPU that is there would be taken whole for nothing.
    jax.config.update("jax_platforms", "cpu")
    made = prepare(
        given.directory,
        episodes_per_task=given.episodes_per_task,
        val_episodes_per_task=given.val_episodes_per_task,
        image_size=given.image_size,
        seed=given.seed,
    )
    print(f"{made.dataset}: {made.num_episodes} episodes, {made.num_steps} control steps; tokenizer {made.tokenizer}")


def _source(given: argparse.Namespace):
    from openpi_train.data.formats import source_at
    from openpi_train.data.rlds import Rlds

    source = source_at(given.path)
    if isinstance(source, Rlds):
        source = dataclasses.replace(source, split=given.split)
    elif given.split != "train":
        raise ValueError(
            f"{given.path} is a {type(source).__name__} dataset, which has no splits: leave out --split {given.split}"
        )
    return dataclasses.replace(source, on_bad_record=given.on_bad_record).open()


def _index(given: argparse.Namespace) -> None:
    source = _source(given)
    print(
        f"{given.path}, {given.split}: {source.num_episodes} episodes, {source.num_steps} control steps, "
        f"{source.num_dropped} bad records left out; cameras {', '.join(source.cameras)}; "
        f"columns {', '.join(source.columns)}; {len(source.prompts)} instructions"
    )


def _repack(given: argparse.Namespace) -> None:
    from openpi_train.data.repack import repack

    print(
        f"wrote {repack(_source(given), given.out, split=given.split)}; "
        f"train from it with --data.datasets.0.source.path {given.out}"
    )
