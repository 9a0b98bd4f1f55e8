#!/usr/bin/env python3
"""The older tool's way to encode the datasets of a YAML config; a door to `posttrain --mode data_process`.

python scripts/prepare_datasets.py --config config.yaml
"""

import sys

if __name__ == "__main__":  # data workers are spawned processes that import this module again
    import checkout

    checkout.ready()
    from openpi_train.cli import run

    sys.exit(run(["posttrain", "--mode", "data_process", *sys.argv[1:]]))
