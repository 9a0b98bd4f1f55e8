#!/usr/bin/env python3
"""The entry point of openpi's norm stats, with its words; a thin door to `python -m openpi_train stats`.

python scripts/compute_norm_stats.py --config-name pi05_libero
"""

import sys

if __name__ == "__main__":
    import checkout

    checkout.ready()
    from openpi_train.cli import run

    sys.exit(run(["stats", *sys.argv[1:]]))
