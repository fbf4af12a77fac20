#!/usr/bin/env bash
# Stands in for srun, scontrol, ray and apptainer on one machine; the name it is called by decides. FAKE_* say what fails.
set -euo pipefail
echo "$(basename "$0") $*" >>"$FAKE_LOG"

fake_srun() { # each host of --nodelist runs the command; USR1 is passed on, TERM ends all, the first failure too
    local hosts='' host pids=() code=0
    while [[ $1 == --* ]]; do
        [[ $1 != --nodelist=* ]] || hosts=${1#*=}
        shift
    done
    trap 'kill -USR1 "${pids[@]}" 2>/dev/null || true' USR1
    trap 'kill -TERM "${pids[@]}" 2>/dev/null || true; exit 143' TERM
    for host in ${hosts//,/ }; do
        [[ $* != *" worker"* || -z ${FAKE_UNSHARED:-} ]] || export ATTEMPT=/nonexistent
        SLURMD_NODENAME=$host SLURM_NODEID=${#pids[@]} "$@" &
        pids+=($!)
    done
    if [[ $* == *" worker"* && -n ${FAKE_NODE_FAILURE:-} ]]; then
        sleep 1
        echo "srun: error: Node failure on n2" >&2
        kill -TERM "${pids[@]}"
        exit 1
    fi
    for _ in "${pids[@]}"; do
        while :; do # a signal interrupts wait
            code=0
            wait -n "${pids[@]}" || code=$?
            ((code <= 128)) && break
            kill -0 "${pids[@]}" 2>/dev/null || break
        done
        ((code == 0)) || { kill -TERM "${pids[@]}" 2>/dev/null || true; exit "$code"; }
    done
}

fake_ray() { # head: listens on --port; worker: stays; FAKE_HEAD, FAKE_WORKER: "mute" or "dies after SECONDS"
    local word port='' role=WORKER fate
    for word in "$@"; do
        case $word in --head) role=HEAD ;; --port=*) port=${word#*=} ;; esac
    done
    fate=FAKE_$role
    case ${!fate:-} in
        dies*) sleep "${!fate##* }"; echo "raylet [exit code=-9]"; exit 1 ;;
        mute) exec sleep 600 ;;
    esac
    [[ $role == WORKER ]] && exec sleep 600
    exec python3 -c "
import socket, time
with socket.socket() as s:
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind(('', $port)); s.listen(); time.sleep(600)"
}

fake_python() { # the check that Ray is complete
    [[ -z ${FAKE_INCOMPLETE:-} ]] || { echo "bipace: after 1 s Ray counts 1 nodes and 2 GPUs, awaited: 2 nodes and 4 GPUs"; exit 69; }
}

case $(basename "$0") in
    srun) fake_srun "$@" ;;
    ray) fake_ray "$@" ;;
    python) fake_python "$@" ;;
    scontrol)
        case $1 in
            show) tr , '\n' <<<"$3" ;;
            requeue) kill -KILL "$PPID" ;;
        esac
        ;;
    apptainer)
        shift
        while [[ $1 == --* ]]; do case $1 in --nv) shift ;; *) shift 2 ;; esac; done
        shift # the image
        exec "$@"
        ;;
esac
