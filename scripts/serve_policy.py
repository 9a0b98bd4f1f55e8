#!/usr/bin/env python3
"""The entry point of openpi's server of policies, with its words; a thin door to `python -m openpi_train serve`.

python scripts/serve_policy.py policy:checkpoint --policy.config=pi05_libero --policy.dir=checkpoints/pi05_libero/x
"""

import sys

if __name__ == "__main__":
    import checkout

    checkout.ready()
    from openpi_train.cli import run

    sys.exit(run(["serve", *sys.argv[1:]]))
