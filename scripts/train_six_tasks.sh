#!/usr/bin/env bash
# Train a diffusion policy on data/six_tasks.zarr, on one GPU; its action dims choose the experiment:
#
#   ./scripts/train_six_tasks.sh <setting> <episodes> <seed> <GPU number> [--dry-run] [-- flags ...]
set -euo pipefail

if [[ "${1:-}" =~ ^(-h|--help)$ ]]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
fi

if [ $# -lt 4 ]; then
    echo "train_six_tasks.sh: four arguments are needed, $# given" >&2
    echo "usage: $0 <setting> <episodes> <seed> <GPU number> [--dry-run] [-- flags ...]" >&2
    exit 2
fi
exec "$(dirname "$0")/train_multi_gpu.sh" six_tasks "${@:1:3}" 1 "$4" "${@:5}"
