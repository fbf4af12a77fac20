#!/usr/bin/env bash
# A tiny model through the real trainer on any machine, in every mode:
#
#   train_cpu.sh rooms|textcraft full|window sync|async [trainer flags]
#
# OUT (default runs/<the three words>) is the run folder, ITERATIONS (default 5) how long to train, PYTHON the
# interpreter. Every iteration leaves a checkpoint; started again with RESUME=1, a run goes on from the last one.
set -euo pipefail
ENV=${1:?rooms or textcraft} CONTEXT=${2:?full or window} MODE=${3:?sync or async}
shift 3
cd "$(dirname "$0")/../.."
OUT=${OUT:-runs/$ENV-$CONTEXT-$MODE}
ITERATIONS=${ITERATIONS:-5}
PYTHON=${PYTHON:-.venv/bin/python}
WARM_START=${WARM_START:-$OUT/warm_start}

# 1. A tiny Qwen2 that clones a scripted player, slips included, and the tasks.
if [[ ! -d $WARM_START ]]; then
    "$PYTHON" -m openrlhf_bipace.lab.warmstart --env "$ENV" --out "$WARM_START" --tasks-out "$WARM_START" \
        --train-tasks $((8 * ITERATIONS)) --steps "${CLONE_STEPS:-150}" --episodes "${EPISODES:-300}"
fi

# 2. Train it.
MODEL=(
    --actor.model_name_or_path "$WARM_START"
    --data.max_len 1536
    --vllm.num_engines 1
    --vllm.enable_prefix_caching
)
DATA=(
    --data.prompt_dataset "$WARM_START/train.jsonl"
    --data.label_key label
    --rollout.batch_size 8
    --rollout.n_samples_per_prompt 4
    --rollout.micro_batch_size 8
    --train.batch_size 16
    --train.micro_batch_size 8
)
LEARNING=(
    --algo.advantage.estimator bipace_q
    --bipace.layer -2
    --bipace.epsilon auto
    --algo.kl.init_coef 0
    --algo.advantage.is_correction_level token
    --actor.adam.lr 5e-4
    --actor.lr_warmup_ratio 0
)
AGENT=(
    --agent.env "$ENV"
    --agent.context "$CONTEXT"
    --agent.history 2
    --agent.template terse
    --agent.max_turns 8
    --agent.max_turn_tokens 48
    --agent.seed_requests
)
[[ $MODE == async ]] && AGENT+=(--train.async_enable)
OUTPUT=(
    --bipace.run_dir "$OUT"
    --logger.tensorboard_dir "$OUT/tensorboard"
    --ckpt.output_dir "$OUT/checkpoint"
    --ckpt.path "$OUT/checkpoints"
    --ckpt.save_steps 1
)
[[ ${RESUME:-} ]] && OUTPUT+=(--ckpt.load_enable)
"$PYTHON" -m openrlhf_bipace.cli.train_ppo_ray \
    "${MODEL[@]}" "${DATA[@]}" "${LEARNING[@]}" "${AGENT[@]}" "${OUTPUT[@]}" "$@"

# 3. Look at it.
"$PYTHON" -m openrlhf_bipace.cli.report "$OUT"
