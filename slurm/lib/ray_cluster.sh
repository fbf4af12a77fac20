# shellcheck shell=bash
# Ray across the nodes of an allocation, and one driver on it, for job scripts; docs/slurm.md explains every setting and
# message.
#
#   source slurm/lib/ray_cluster.sh
#   bipace_setup              the site's settings; sets NODES and GPUS_PER_NODE
#   bipace_run COMMAND...     starts Ray, runs COMMAND as the driver; its exit code is the job's
#
# Needs RUN_DIR: the run folder, on a file system that every node sees.

BIPACE_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
RAY_NODE=$BIPACE_ROOT/slurm/lib/ray_node.sh
STOPPED=75             # the trainer's exit code when it stopped at request, checkpoint saved
POLL=${BIPACE_POLL:-1} # seconds between two looks at a condition
# shellcheck source=slurm/lib/ray_node.sh
source "$RAY_NODE"

bipace_setup() { # the site's settings, modules, GPUS_PER_NODE and NODES for the job script
    local site=$BIPACE_ROOT/slurm/site.env module
    if [[ -r $site ]]; then
        set -a
        # shellcheck source=/dev/null
        source "$site"
        set +a
    fi
    for module in ${BIPACE_MODULES:-}; do module load "$module"; done
    export PYTHONPATH="$BIPACE_ROOT${PYTHONPATH:+:$PYTHONPATH}"
    NODES=${SLURM_JOB_NUM_NODES:-1}
    GPUS_PER_NODE=$(node_gpus)
    [[ $GPUS_PER_NODE -gt 0 ]] || { say "no GPU on $(hostname): ask with --gpus-per-node or set BIPACE_GPUS_PER_NODE"; exit 2; }
    export BIPACE_ROOT NODES GPUS_PER_NODE
}

bipace_run() { # COMMAND...: start Ray, run the driver, end both; exits with the driver's code
    BIPACE_JOB=${SLURM_JOB_ID:?this is for sbatch; without SLURM see examples/scripts/multi_node_ray.sh}
    RESTARTS=${SLURM_RESTART_COUNT:-0}
    MAX_REQUEUES=${BIPACE_MAX_REQUEUES:-10}
    ATTEMPT=$RUN_DIR/slurm/$BIPACE_JOB.$RESTARTS
    declare -gA STEP=()
    begin_attempt
    trap 'ask_to_stop' USR2
    trap 'finish 143 "the job was cancelled or reached its time limit"' TERM
    mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    HEAD_ADDRESS=$(node_address) || finish "$UNAVAILABLE" "no numeric address of ${HOSTS[0]} (set BIPACE_NET_INTERFACE)"
    HEAD_PORT=$(free_port_block "$BIPACE_JOB") || finish "$UNAVAILABLE" "no free ports on ${HOSTS[0]}"
    export BIPACE_JOB RESTARTS ATTEMPT HEAD_ADDRESS HEAD_PORT
    say "job $BIPACE_JOB, attempt $((RESTARTS + 1)): ${#HOSTS[@]} nodes of $GPUS_PER_NODE GPUs, Ray at $HEAD_ADDRESS:$HEAD_PORT, logs in $ATTEMPT"
    start_step head "${HOSTS[0]}" head
    await_head
    if ((${#HOSTS[@]} > 1)); then
        start_step workers "$(IFS=,; echo "${HOSTS[*]:1}")" worker
    fi
    start_step driver "${HOSTS[0]}" driver "${#HOSTS[@]}" "$@"
    while watch_steps; do sleep "$POLL"; done
    end_of_driver "$DRIVER_CODE"
}

free_port_block() { # first of 4 ports from the job id, below the ephemeral range; the next block if one is taken
    local block=$1 listening port taken
    listening=$(awk '$4 == "0A" {sub(".*:", "", $2); print $2}' /proc/net/tcp /proc/net/tcp6 2>/dev/null || true)
    for _ in {1..5000}; do
        block=$((block % 5000)) taken=
        for port in {0..3}; do
            [[ $listening != *$(printf '%04X' $((10000 + 4 * block + port)))* ]] || taken=yes
        done
        [[ -n $taken ]] || { echo $((10000 + 4 * block)); return; }
        block=$((block + 1))
    done
    return 1
}

begin_attempt() { # the attempt's folder, the tracker's id, no stop left over
    mkdir -p "$ATTEMPT" || { say "cannot create $ATTEMPT"; exit "$UNAVAILABLE"; }
    echo "$BIPACE_JOB.$RESTARTS" >"$ATTEMPT/canary"
    env | grep -E '^(SLURM|BIPACE)_' | grep -viE 'key|token|secret|passw' | sort >"$ATTEMPT/job.env" || true
    ((RESTARTS <= MAX_REQUEUES)) || finish "$UNAVAILABLE" "started $((RESTARTS + 1)) times, at most $((MAX_REQUEUES + 1)) (BIPACE_MAX_REQUEUES)"
    rm -f "$RUN_DIR/stop"
    [[ -s $RUN_DIR/tracker_id ]] || echo "$BIPACE_JOB-$(date +%s)" >"$RUN_DIR/tracker_id"
    WANDB_RUN_ID=$(<"$RUN_DIR/tracker_id")
    export WANDB_RUN_ID WANDB_RESUME=allow
}

start_step() { # NAME HOSTS ROLE ...: one srun, inside the container if there is one
    local name=$1 hosts=$2 count wrap=() options=()
    shift 2
    count=$(awk -F, '{print NF}' <<<"$hosts")
    options=(--overlap --nodes="$count" --ntasks="$count" --ntasks-per-node=1 --nodelist="$hosts" --kill-on-bad-exit=1
        --cpus-per-task="${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE:-1}}")
    case ${BIPACE_CONTAINER:-} in
        '') ;;
        pyxis:*) options+=(--container-image="${BIPACE_CONTAINER#pyxis:}" --container-workdir="$BIPACE_ROOT"
            --container-mounts="$(container_mounts)") ;;
        apptainer:*) wrap=(apptainer exec --nv --pwd "$BIPACE_ROOT" --bind "$(container_mounts)" "${BIPACE_CONTAINER#apptainer:}") ;;
        *) finish 2 "BIPACE_CONTAINER: got '$BIPACE_CONTAINER', allowed: nothing, apptainer:FILE or pyxis:IMAGE" ;;
    esac
    if [[ $name == driver ]]; then # its output is the job's
        srun "${options[@]}" "${wrap[@]}" bash "$RAY_NODE" "$@" > >(tee -a "$ATTEMPT/driver.log") 2>&1 &
    else
        srun "${options[@]}" "${wrap[@]}" bash "$RAY_NODE" "$@" >"$ATTEMPT/srun.$name.log" 2>&1 &
    fi
    STEP[$name]=$!
}

container_mounts() { # the repository, the run folder, node-local temporary space and whatever the site adds
    local path mounts=
    for path in "$BIPACE_ROOT" "$RUN_DIR" "${BIPACE_TMP:-/tmp}" ${BIPACE_MOUNTS:-}; do mounts+=",$path:$path"; done
    echo "${mounts#,}"
}

await_head() { # until Ray's port answers
    local deadline=$((SECONDS + ${BIPACE_HEAD_DEADLINE:-180}))
    until (exec 3<>"/dev/tcp/$HEAD_ADDRESS/$HEAD_PORT") 2>/dev/null; do
        kill -0 "${STEP[head]}" 2>/dev/null || finish "$UNAVAILABLE" "$(reason head)"
        ((SECONDS < deadline)) || finish "$UNAVAILABLE" "Ray's head did not listen on $HEAD_ADDRESS:$HEAD_PORT within ${BIPACE_HEAD_DEADLINE:-180} s"
        sleep "$POLL"
    done
}

watch_steps() { # false once the driver has ended; a step of Ray's that ends first ends the job
    local name
    for name in head workers; do
        [[ -z ${STEP[$name]:-} ]] || kill -0 "${STEP[$name]}" 2>/dev/null || finish "$UNAVAILABLE" "$(reason "$name")"
    done
    kill -0 "${STEP[driver]}" 2>/dev/null && return 0
    DRIVER_CODE=0
    wait "${STEP[driver]}" || DRIVER_CODE=$?
    unset 'STEP[driver]'
    return 1
}

reason() { # NAME: why this step ended, in one line
    local code=0 file=$ATTEMPT/srun.$1.log found
    wait "${STEP[$1]}" || code=$?
    found=$(cat "$ATTEMPT"/failed.* 2>/dev/null | head -n 1 | cut -c 1-300)
    [[ -n $found ]] || found=$(grep -m1 -iE 'node failure|not responding|cannot read|unable to|failed' "$file" || true)
    echo "the $1 step ended with exit $code: ${found:-see $file}"
}

end_of_driver() { # CODE: finish, or stop at request and requeue
    local code=$1 name last
    ((code != 0)) || finish 0 "the driver ended with exit 0"
    if ((code == STOPPED)); then
        [[ -n ${ASKED_TO_STOP:-} ]] || finish "$STOPPED" "stopped at a step boundary, checkpoint saved (somebody touched $RUN_DIR/stop)"
        ((RESTARTS < MAX_REQUEUES)) || finish "$STOPPED" "stopped with its checkpoint saved; not requeued: $MAX_REQUEUES requeues used (BIPACE_MAX_REQUEUES)"
        requeue
    fi
    for _ in {1..5}; do # a driver that fails because Ray died is not the cause
        for name in head workers; do
            [[ -z ${STEP[$name]:-} ]] || kill -0 "${STEP[$name]}" 2>/dev/null || finish "$code" "$(reason "$name")"
        done
        sleep "$POLL"
    done
    last=$(grep -vE '^[[:space:]]*$|^(srun|slurmstepd)' "$ATTEMPT/driver.log" | tail -n 1 | cut -c 1-300 || true)
    finish "$code" "the driver ended with exit $code: ${last:-no output}"
}

ask_to_stop() { # USR2: the trainer looks for this file after every step
    ASKED_TO_STOP=yes
    say "USR2: stopping after the current step"
    touch "$RUN_DIR/stop"
}

requeue() { # SLURM ends this shell and starts the job again
    trap '' USR2
    trap 'exit "$STOPPED"' TERM
    end_steps
    echo "$STOPPED stopped at a step boundary, requeued" >"$ATTEMPT/outcome"
    say "checkpoint saved; requeue $((RESTARTS + 1)) of at most $MAX_REQUEUES"
    scontrol requeue "$BIPACE_JOB" || finish "$STOPPED" "checkpoint saved, but scontrol requeue failed: submit again to go on"
    while :; do sleep "$POLL"; done
}

finish() { # CODE REASON: the one line, then end our own steps
    local code=$1
    trap '' USR2 TERM
    echo "$code $2" >"$ATTEMPT/outcome"
    if ((code == 0)); then say "done: $2"; else say "FAILED with exit $code: $2 (logs: $ATTEMPT)"; fi
    end_steps
    exit "$code"
}

end_steps() { # USR1, once: the node scripts end Ray and keep its logs; what lasts longer, srun ends
    local name deadline=$((SECONDS + ${BIPACE_END_DEADLINE:-30}))
    for name in "${!STEP[@]}"; do
        if [[ $name == driver ]]; then signal_step driver TERM; else signal_step "$name" USR1; fi
    done
    while ((${#STEP[@]})); do
        for name in "${!STEP[@]}"; do
            kill -0 "${STEP[$name]}" 2>/dev/null || { unset "STEP[$name]"; continue; }
            ((SECONDS < deadline)) || signal_step "$name" TERM
        done
        ((SECONDS < deadline + 10)) || return 0 # what is left ends with the job
        sleep "$POLL"
    done
}

signal_step() { # NAME SIGNAL: to our own srun, which passes USR1 on and answers TERM by ending its step
    kill -s "$2" "${STEP[$1]}" 2>/dev/null || true
}
