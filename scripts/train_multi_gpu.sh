#!/usr/bin/env bash
# Train a diffusion policy on the zarr store of a RoboTwin task, on several GPUs of this host; the arguments are those of
# the older script of this name:
#
#   ./scripts/train_multi_gpu.sh <task> <setting> <episodes> <seed> <GPUs> [GPU numbers: 0,2] [--dry-run] [-- flags ...]
#
# The store is data/<task>.zarr (or with a dash for _), else data/<task>-<setting>-<episodes>.zarr; its action dims choose
# between robot_dp_10, robot_dp_14 and robot_dp_16. The run is called <task>-<setting>-<episodes>_seed<seed>; it goes on
# where it stopped; data/outputs/<task>-robot_dp-train_seed<seed>/logs.json.txt leads to its log. As there, each GPU takes the batch size. What follows -- is added. Environment: DATA (data), PYTHON
# (python, or that of .venv), EXPERIMENT (robot_dp).
#
# Without arguments, or with a number of GPUs or an option first, it is the PaliGemma VLA's script of this name:
# run_ddp_training.sh.
set -euo pipefail

if [[ "${1:-}" =~ ^(-h|--help)$ ]]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exec "$(dirname "$0")/run_ddp_training.sh" --help
fi

if [ $# -eq 0 ] || [[ "$1" =~ ^([0-9]+$|-) ]]; then
    exec "$(dirname "$0")/run_ddp_training.sh" "$@"
fi

usage() {
    echo "train_multi_gpu.sh: $1" >&2
    echo "usage: $0 <task> <setting> <episodes> <seed> <GPUs> [GPU numbers] [--dry-run] [-- flags ...]" >&2
    echo "or, as the PaliGemma VLA's script: $0 [GPUs] [config] [experiment name] [options ...]" >&2
    exit 2
}

[ $# -ge 5 ] || usage "five arguments are needed, $# given"
task=$1 setting=$2 episodes=$3 seed=$4 gpus=$5
shift 5
if [[ "${1:-}" =~ ^[0-9]+(,[0-9]+)*$ ]]; then
    export CUDA_VISIBLE_DEVICES=$1
    listed=${1//[^,]/}
    [ $((${#listed} + 1)) = "$gpus" ] || usage "$gpus GPUs, but the numbers $1"
    shift
fi
if [ "${1:-}" = "--dry-run" ]; then
    dry_run=(--dry-run)
    shift
else
    dry_run=()
fi
[ $# -eq 0 ] || [ "$1" = "--" ] || usage "put -- before flags of the experiment, not '$1'"
shift $(($# > 0 ? 1 : 0))

name=$task-$setting-$episodes
data=${DATA:-data}
store=$data/$name.zarr
[ "$task" = six_tasks ] && store=$data/six_tasks.zarr # what merge_zarr.py writes
for one in "$data/$task.zarr" "$data/${task//_/-}.zarr"; do
    [ -e "$one" ] && store=$one && break
done

if [ "$gpus" -gt 1 ]; then
    echo "train_multi_gpu.sh: as there, each of the $gpus GPUs takes the batch size, and the learning rate stays;" \
        "-- --keep-effective-batch-size counts the rows of all GPUs" >&2
fi
# Where the older script had its log.
export OPENPI_TRAIN_LINKS="$data/outputs/$task-robot_dp-train_seed$seed/logs.json.txt=logs.json.txt"
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec "${PYTHON:-$(command -v python || command -v python3)}" "$here/checkout.py" -m openpi_train launch local --processes "$gpus" "${dry_run[@]}" -- \
    "${EXPERIMENT:-robot_dp}" --exp-name "${name}_seed$seed" --seed "$seed" --dataset "$store" --resume \
    --no-keep-effective-batch-size --logs-json "$@"
