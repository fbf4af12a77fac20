#!/usr/bin/env bash
# Ray over several machines without SLURM, and one command on it. Run this same line on every machine at about the same
# time, only NODE_RANK differs (0 .. NNODES - 1); the command runs on rank 0 once Ray counts every node and GPU:
#
#   NNODES=2 NODE_RANK=0 HEAD_ADDRESS=10.0.0.1 RUN_DIR=/shared/runs/x examples/scripts/multi_node_ray.sh \
#       python -m openrlhf_bipace.cli.train_ppo_ray --bipace.run_dir /shared/runs/x --actor.num_nodes 2 ...
#
# HEAD_ADDRESS is rank 0's numeric address, RUN_DIR a folder every machine sees. HEAD_PORT (default 16379) must be free
# on rank 0. Logs end up in RUN_DIR/nodes; the exit code of rank 0 is the command's. docs/slurm.md has the settings.
set -euo pipefail
# shellcheck source=slurm/lib/ray_cluster.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../slurm/lib/ray_cluster.sh"
: "${NNODES:?} ${NODE_RANK:?} ${HEAD_ADDRESS:?} ${RUN_DIR:?} ${1:?a command}"
export NODE_RANK HEAD_ADDRESS HEAD_PORT=${HEAD_PORT:-16379} RESTARTS=0
export BIPACE_JOB=$HEAD_PORT BIPACE_NODE=rank$NODE_RANK ATTEMPT=$RUN_DIR/nodes
export PYTHONPATH="$BIPACE_ROOT${PYTHONPATH:+:$PYTHONPATH}"

if ((NODE_RANK == 0)); then
    rm -rf "$ATTEMPT"
    mkdir -p "$ATTEMPT"
    touch "$ATTEMPT/canary"
    bash "$RAY_NODE" head &
else
    until (exec 3<>"/dev/tcp/$HEAD_ADDRESS/$HEAD_PORT") 2>/dev/null; do
        ((SECONDS < ${BIPACE_HEAD_DEADLINE:-180})) || { say "nothing listens on $HEAD_ADDRESS:$HEAD_PORT"; exit "$UNAVAILABLE"; }
        sleep "$POLL"
    done
    bash "$RAY_NODE" worker &
fi
NODE_PID=$!
trap 'kill -TERM "$NODE_PID" 2>/dev/null || true; wait "$NODE_PID" || true' EXIT

if ((NODE_RANK == 0)); then
    code=0
    bash "$RAY_NODE" driver "$NNODES" "$@" || code=$?
    echo "$code" >"$ATTEMPT/done"
    exit "$code"
fi
until [[ -e $ATTEMPT/done ]]; do
    kill -0 "$NODE_PID" 2>/dev/null || { say "Ray ended on this node; see $ATTEMPT/node.$BIPACE_NODE.log"; exit "$UNAVAILABLE"; }
    sleep "$POLL"
done
