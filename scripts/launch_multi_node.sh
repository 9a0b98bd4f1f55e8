#!/usr/bin/env bash
# Start a run on several hosts. Either this host's share: the same line on every host, with NODE_RANK set on each but
# the first. Or all of it from here, over ssh, with the names of all hosts, the master first, in HOSTS:
#
#   NODE_RANK=1 ./scripts/launch_multi_node.sh <master address> <hosts> <processes per host> [-- experiment ...]
#   HOSTS=node1,node2 ./scripts/launch_multi_node.sh <master address> <hosts> <processes per host> [-- experiment ...]
#
# Without an experiment it trains pi0_bridge_traj, continuing a run that is there. Environment: MASTER_PORT (29500),
# PYTHON (python, or that of .venv).
set -euo pipefail

if [[ "${1:-}" =~ ^(-h|--help)$ ]]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
fi

usage() {
    echo "launch_multi_node.sh: $1" >&2
    echo "usage: [NODE_RANK=k | HOSTS=a,b] $0 <master address> <hosts> <processes per host> [-- experiment --exp-name x ...]" >&2
    exit 2
}

[ $# -ge 3 ] || usage "three arguments are needed, $# given"
master=$1 hosts=$2 per_host=$3
shift 3
if [ "${1:-}" = "--dry-run" ]; then
    dry_run=(--dry-run)
    shift
else
    dry_run=()
fi
[ $# -eq 0 ] || [ "$1" = "--" ] || usage "put -- before the experiment, not '$1'"
shift $(($# > 0 ? 1 : 0))
[ $# -gt 0 ] || set -- pi0_bridge_traj --exp-name multi_node_training --resume

own_addresses() {
    echo localhost 127.0.0.1
    hostname
    hostname -f 2>/dev/null || true
    hostname -I 2>/dev/null || true
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
launch=("${PYTHON:-$(command -v python || command -v python3)}" "$here/checkout.py" -m openpi_train launch)
run=(--processes-per-node "$per_host" --master-addr "$master" --master-port "${MASTER_PORT:-29500}" "${dry_run[@]}" -- "$@")

# Where the guide of the older tool has its log.
export OPENPI_TRAIN_LINKS=${OPENPI_TRAIN_LINKS:-logs/training.log=logs/process_0.log}

if [ -n "${HOSTS:-}" ]; then
    IFS=, read -ra names <<<"$HOSTS"
    [ "${#names[@]}" = "$hosts" ] || usage "HOSTS names ${#names[@]} hosts ($HOSTS), not $hosts"
    exec "${launch[@]}" ssh --hosts "$HOSTS" --env OPENPI_TRAIN_LINKS "${run[@]}"
fi

if [ -z "${NODE_RANK:-}" ]; then
    if [ "$hosts" = 1 ] || own_addresses | tr ' ' '\n' | grep -qxF "$master"; then
        NODE_RANK=0
    else
        usage "this host is not $master, so say which it is: NODE_RANK=1 for the second host, and so on; or name all in HOSTS"
    fi
fi

exec "${launch[@]}" manual --node-rank "$NODE_RANK" --num-nodes "$hosts" "${run[@]}"
