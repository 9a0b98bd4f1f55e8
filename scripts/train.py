#!/usr/bin/env python
"""The entry point of RoboTwin's diffusion policy, with Hydra's words; a thin door to `python -m openpi_train`.

python scripts/train.py --config-name=robot_dp_14 task.name=six_tasks task.dataset.zarr_path=data/six_tasks.zarr
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # data workers are spawned processes that import this module again
    # Also from a checkout that is not installed, like `python -m` from its root.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from openpi_train.cli import run

    sys.exit(run(sys.argv[1:]))
