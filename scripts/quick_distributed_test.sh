#!/usr/bin/env bash
# Does distributed RL work here? A small pi0 imitates for a moment on the embedded tabletop, and then learns from
# its own episodes in two processes (a GPU each, or a CPU device each). It needs no data and no download:
#
#   ./scripts/quick_distributed_test.sh [--dry-run] [options of launch_distributed_training.sh ...]
#
# It writes to ./output and goes on with what is there. Environment: PYTHON (python, or that of .venv).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-$(command -v python || command -v python3)}
imitation=("$python" "$here/checkout.py" -m openpi_train tabletop_few --exp-name quick_distributed_test
    --checkpoint-base-dir ./output --resume --num-train-steps 600
    --eval.interval 0 --eval.closed-loop.interval 0 --eval.closed-loop.episodes-per-task 20)
case " $* " in
*" --help "* | *" -h "*) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" ;;
*" --dry-run "*) printf '%q ' "${imitation[@]}" && echo ;;
*) "${imitation[@]}" ;;
esac
exec "$here/launch_distributed_training.sh" --config "$here/quick_distributed_test.yaml" --gpus 2 "$@"
