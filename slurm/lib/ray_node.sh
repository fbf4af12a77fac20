#!/usr/bin/env bash
# What one step of a job runs on a node: Ray's head, a Ray worker, or the driver. Also sourced by ray_cluster.sh.
#
#   bash ray_node.sh head|worker             Ray in the foreground, until USR1, TERM or its death
#   bash ray_node.sh driver NODES COMMAND... COMMAND, once Ray counts NODES nodes and all their GPUs
#
# Needs in the environment: HEAD_ADDRESS, HEAD_PORT, ATTEMPT (folder for logs), BIPACE_JOB, RESTARTS.

UNAVAILABLE=69 # exit code: Ray did not come up, a node was lost, ...

say() { printf 'bipace: %s\n' "$*"; }

node_gpus() { # GPUs that SLURM gave to this node
    if [[ -n ${BIPACE_GPUS_PER_NODE:-} ]]; then
        echo "$BIPACE_GPUS_PER_NODE"
    elif [[ -n ${SLURM_GPUS_ON_NODE:-} ]]; then
        echo "${SLURM_GPUS_ON_NODE##*:}"
    elif command -v nvidia-smi >/dev/null; then
        nvidia-smi -L | grep -c '^GPU'
    else
        echo 0
    fi
}

node_address() { # numeric IPv4 address that the other nodes reach
    local address
    if [[ -n ${BIPACE_NET_INTERFACE:-} ]]; then
        address=$(ip -4 -o address show dev "$BIPACE_NET_INTERFACE" | awk '{sub("/.*", "", $4); print $4; exit}')
    else
        address=$(getent ahostsv4 "$(hostname)" | awk '$1 !~ /^127/ {print $1; exit}' || true)
        [[ -n $address ]] || address=$(hostname -I 2>/dev/null | tr ' ' '\n' | grep -m1 -E '^[0-9.]+$' || true)
    fi
    [[ -n $address ]] && echo "$address"
}

node_fail() { # one line for the batch shell, which ends the job
    say "$NODE: $1" | tee "$ATTEMPT/failed.$NODE"
    exit "$UNAVAILABLE"
}

node_main() { # head|worker: one Ray node in the foreground until USR1 or its death
    local role=$1 address options
    NODE=${BIPACE_NODE:-${SLURMD_NODENAME:-$(hostname)}}
    [[ -r $ATTEMPT/canary ]] || { echo "bipace: $NODE cannot read $ATTEMPT: not a shared file system" >&2; exit 1; }
    exec >>"$ATTEMPT/node.$NODE.log" 2>&1
    address=$(node_address) || node_fail "no numeric address (set BIPACE_NET_INTERFACE)"
    NODE_TEMP="${BIPACE_TMP:-/tmp}/bp$BIPACE_JOB.$RESTARTS.${role::1}${SLURM_NODEID:-${NODE_RANK:-0}}"
    ((${#NODE_TEMP} <= 40)) || node_fail "$NODE_TEMP is too long for Ray's sockets (shorten BIPACE_TMP)"
    RAY=
    trap 'STOPPING=yes; [[ -z $RAY ]] || kill -TERM "$RAY" 2>/dev/null || true' USR1 TERM
    mkdir -m 700 "$NODE_TEMP" || node_fail "cannot create $NODE_TEMP"
    trap node_clean EXIT
    if [[ $role == head ]]; then
        options=(--head --port="$HEAD_PORT" --ray-client-server-port=$((HEAD_PORT + 1)) --dashboard-port=$((HEAD_PORT + 2))
            --include-dashboard="${BIPACE_DASHBOARD:-false}")
        address=${HEAD_ADDRESS:-$address}
    else
        options=(--address="$HEAD_ADDRESS:$HEAD_PORT")
    fi
    options+=(--node-ip-address="$address" --temp-dir="$NODE_TEMP" --num-gpus="$(node_gpus)"
        --num-cpus="${BIPACE_CPUS:-${SLURM_CPUS_ON_NODE:-$(nproc)}}" --min-worker-port=0 --max-worker-port=0
        --disable-usage-stats --block)
    [[ -z ${BIPACE_OBJECT_STORE_MB:-} ]] || options+=(--object-store-memory=$((BIPACE_OBJECT_STORE_MB * 1000000)))
    # USR1 is for this shell: SLURM sends it to every process of the step, and Ray's inherit that they ignore it.
    (trap '' USR1; exec ray start "${options[@]}") &
    RAY=$!
    local code=0
    [[ -z ${STOPPING:-} ]] || kill -TERM "$RAY" 2>/dev/null || true
    wait "$RAY" || code=$?
    [[ -n ${STOPPING:-} ]] || node_fail "Ray ended with exit $code: $(tail -n 5 "$ATTEMPT/node.$NODE.log" | tr -s '\n ' ' ')"
    wait "$RAY" || true # the first wait ended with the signal
}

node_clean() { # keep Ray's logs, remove the temporary folder
    trap '' USR1 TERM
    mkdir -p "$ATTEMPT/ray.$NODE"
    cp -r "$NODE_TEMP"/session_latest/logs/. "$ATTEMPT/ray.$NODE/" 2>/dev/null || true
    rm -rf "$NODE_TEMP"
}

driver_main() { # NODES COMMAND...: wait until Ray counts every node and GPU, then become the driver
    local nodes=$1
    shift
    export RAY_ADDRESS="$HEAD_ADDRESS:$HEAD_PORT"
    local gpus=$((nodes * $(node_gpus)))
    "${BIPACE_PYTHON:-python}" -m openrlhf_bipace.integration.readiness --nodes "$nodes" --gpus "$gpus" \
        --deadline "${BIPACE_NODES_DEADLINE:-300}" || exit $?
    touch "$ATTEMPT/ready"
    exec "$@"
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
    set -euo pipefail
    [[ ${BIPACE_PYTHON:-} != /* ]] || PATH=$(dirname "$BIPACE_PYTHON"):$PATH # `ray`, and what vLLM calls by name
    case ${1:-} in
        head | worker) node_main "$1" ;;
        driver) driver_main "${@:2}" ;;
        *) echo "usage: ray_node.sh head | worker | driver NODES COMMAND..." >&2; exit 2 ;;
    esac
fi
