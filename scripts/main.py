#!/usr/bin/env python3
"""The entry point of the PyTorch post-training tool; a thin door to `python -m openpi_train posttrain`.

    python scripts/main.py --config config.yaml --mode train --algorithm sft

Launchers that set RANK and WORLD_SIZE may start it: torchrun, python -m torch.distributed.launch, deepspeed.
"""

import sys

if __name__ == "__main__":  # data workers are spawned processes that import this module again
    import checkout

    checkout.ready()
    from openpi_train.cli import run

    sys.exit(run(["posttrain", *sys.argv[1:]]))
