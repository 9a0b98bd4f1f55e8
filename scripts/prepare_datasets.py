#!/usr/bin/env python
"""The older tool's way to encode the datasets of a YAML config; a door to `posttrain --mode data_process`.

python scripts/prepare_datasets.py --config config.yaml
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # data workers are spawned processes that import this module again
    # Also from a checkout that is not installed, like `python -m` from its root.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from openpi_train.cli import run

    sys.exit(run(["posttrain", "--mode", "data_process", *sys.argv[1:]]))
