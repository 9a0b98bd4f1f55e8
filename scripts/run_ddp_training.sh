#!/usr/bin/env bash
# Train a PaliGemma policy by a YAML config, on several GPUs of this host; the arguments are those of the VLA trainer's
# script:
#
#   ./scripts/run_ddp_training.sh [GPUs] [config] [experiment name] [options of main_train_ddp.py ...]
#
# Without GPUs one process uses all of this host; without a config it is configs/vla_config.yaml. As there, each GPU takes
# the batch size, unless --keep_effective_batch_size is given. Environment: PYTHON (python, or that of .venv).
set -euo pipefail

if [[ " $* " =~ \ (-h|--help)\  ]]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
fi

words=()
for option in --world_size --config_path --experiment_name; do
    if [ $# -eq 0 ] || [[ "$1" == -* ]]; then
        break
    fi
    if [ "$option" = --world_size ] && ! [[ "$1" =~ ^[1-9][0-9]*$ ]]; then
        echo "run_ddp_training.sh: the number of GPUs comes first, not '$1'" >&2
        echo "usage: $0 [GPUs] [config] [experiment name] [options of main_train_ddp.py ...]" >&2
        exit 2
    fi
    words+=("$option" "$1")
    shift
done
exec "${PYTHON:-$(command -v python || command -v python3)}" "$(dirname "$0")/main_train_ddp.py" ${words[@]+"${words[@]}"} "$@"
