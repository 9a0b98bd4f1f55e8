#!/usr/bin/env python3
"""The entry point of the PaliGemma VLA's PyTorch trainer; a thin door to `launch local` with the verb `vla`.

python scripts/main_train_ddp.py --config_path configs/vla_config.yaml --world_size 4 --keep_effective_batch_size
"""

import sys

import checkout

checkout.ready()

from openpi_train.doors.vla.vla_launch import main
from openpi_train.runtime.closed_output import quietly

if __name__ == "__main__":
    sys.exit(quietly(lambda: main(sys.argv[1:])))
