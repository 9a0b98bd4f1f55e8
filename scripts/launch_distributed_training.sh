#!/usr/bin/env bash
# Let a robot policy learn from its own episodes by a YAML config of the RIPT trainers for pi0; the name and the options
# are those of their script:
#
#   ./scripts/launch_distributed_training.sh --config FILE --gpus 4 [--dry-run] [-- flags of the experiment ...]
#   ./scripts/launch_distributed_training.sh --config FILE --nodes 2 --gpus 4 --node-rank 0 \
#       --master-addr 192.168.1.100 --master-port 12355
#
# --help explains the options (openpi_train/doors/ript/ript_launch.py). On a machine without GPUs --gpus counts processes with a CPU
# device each. Environment: PYTHON (python, or that of .venv).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec "${PYTHON:-$(command -v python || command -v python3)}" "$here/checkout.py" -m openpi_train.doors.ript.ript_launch "$@"
