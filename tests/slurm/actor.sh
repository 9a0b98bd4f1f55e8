#!/bin/bash
# A task that ends as told: `actor.sh <task 0> <task 1> ...`, each an exit code, `kill` or `wait`. After a requeue all end
# with exit code $AFTERWARDS.
echo "task $SLURM_PROCID, start ${SLURM_RESTART_COUNT:-0}"
[ -z "$SLURM_RESTART_COUNT" ] || exit "$AFTERWARDS"
parts=("$@")
case ${parts[$SLURM_PROCID]} in
    wait) # for a request to stop, and then "saved and stopped"
        trap 'kill $!; exit 75' TERM USR1
        echo "listening"
        sleep 100 &
        wait
        ;;
    # Slurm ends the others where it sees one killed: on a busy machine before they have done what they were told.
    kill) trap '' TERM; sleep 0.5 && kill -KILL $$ ;;
    *) trap '' TERM; sleep 0.5 && exit "${parts[$SLURM_PROCID]}" ;;
esac
