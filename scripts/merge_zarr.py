#!/usr/bin/env python3
"""RoboTwin's way to merge the zarr stores of its tasks into one; a thin door to `python -m openpi_train data merge`.

    python scripts/merge_zarr.py                                     all stores in data/, to data/six_tasks.zarr
    python scripts/merge_zarr.py a.zarr b.zarr --out data/two.zarr   these; `data merge --help` has more options

Environment: DATA (data), the folder that `train_multi_gpu.sh` reads.
"""

import argparse
import os
import sys
from pathlib import Path

import checkout

checkout.ready()

from openpi_train.cli import run


def main(argv: list[str]) -> int:
    """Merge, and return the exit code."""
    folder = Path(os.environ.get("DATA", "data"))
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    options.add_argument("--out", type=Path, default=folder / "six_tasks.zarr")
    given, words = options.parse_known_args(argv)
    if not {"-h", "--help"} & set(argv) and (not words or words[0].startswith("-")):
        stores = sorted(one for one in folder.glob("*.zarr") if one.resolve() != given.out.resolve())
        if not stores:
            sys.stderr.write(
                f"merge_zarr.py: there are no zarr stores in {folder.absolute()}: name them, or set DATA\n"
            )
            return 2
        print("merging", *stores, "to", given.out, flush=True)
        words = [*map(str, stores), *words]
    return run(["data", "merge", *words, "--out", str(given.out)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
