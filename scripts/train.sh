#!/usr/bin/env bash
# Train a diffusion policy on the zarr store of a RoboTwin task, on one GPU; the arguments are those of the older script:
#
#   ./scripts/train.sh <task> <setting> <episodes> <seed> <action dims: 10, 14, 16> <GPU number> [--dry-run] [-- flags ...]
#
# `train_multi_gpu.sh` says where the store lies and what the run is called. Of six_tasks the action dims are those of the
# store, as there.
set -euo pipefail

if [[ "${1:-}" =~ ^(-h|--help)$ ]]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
fi

if [ $# -lt 6 ]; then
    echo "train.sh: six arguments are needed, $# given" >&2
    echo "usage: $0 <task> <setting> <episodes> <seed> <action dims> <GPU number> [--dry-run] [-- flags ...]" >&2
    exit 2
fi
[ "$1" = six_tasks ] || export EXPERIMENT=robot_dp_$5
gpu=$6
exec "$(dirname "$0")/train_multi_gpu.sh" "${@:1:4}" 1 "$gpu" "${@:7}"
