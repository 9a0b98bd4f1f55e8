#!/usr/bin/env python3
"""The entry point of RoboTwin's diffusion policy, with Hydra's words; a thin door to `python -m openpi_train`.

python scripts/train.py --config-name=robot_dp_14 task.name=six_tasks task.dataset.zarr_path=data/six_tasks.zarr
"""

import sys

if __name__ == "__main__":  # data workers are spawned processes that import this module again
    import checkout

    checkout.ready()
    from openpi_train.cli import run

    sys.exit(run(sys.argv[1:]))
