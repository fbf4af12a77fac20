#!/usr/bin/env bash
# WebShop's products through the real trainer on any machine: a tiny model, at least 3 iterations.
# DATA (required) is a folder with the files of WebShop (`bipace-data list` says more), OUT (default
# runs/webshop_cpu) the run folder, ITERATIONS (default 3) how long to train, PYTHON the interpreter.
# Further arguments go to the trainer.
set -euo pipefail
DATA=$(realpath "${DATA:?a folder with the files of WebShop, see bipace-data list}")
cd "$(dirname "$0")/../.."
OUT=${OUT:-runs/webshop_cpu}
ITERATIONS=${ITERATIONS:-3}
PYTHON=${PYTHON:-.venv/bin/python}

# 1. A tiny Qwen2 that clones known solutions with every tenth command forgotten, and the tasks: 8 of the split train.
if [[ ! -d $OUT/warm_start ]]; then
    "$PYTHON" -m openrlhf_bipace.lab.warmstart --env webshop --data "$DATA" --tasks 8 --out "$OUT/warm_start" \
        --tasks-out "$OUT" --train-tasks $((4 * ITERATIONS)) --steps "${CLONE_STEPS:-80}" --episodes "${EPISODES:-60}"
fi

# 2. Train it.
MODEL=(
    --actor.model_name_or_path "$OUT/warm_start"
    --data.max_len 3072
    --vllm.num_engines 1
    --vllm.enable_prefix_caching
)
DATASET=(
    --data.prompt_dataset "$OUT/train.jsonl"
    --data.label_key label
    --rollout.batch_size 4
    --rollout.n_samples_per_prompt 4
    --rollout.micro_batch_size 4
    --train.batch_size 16
    --train.micro_batch_size 4
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
    --agent.env webshop
    --agent.data "$DATA"
    --agent.template terse
    --agent.max_turns 6
    --agent.max_turn_tokens 64
    --agent.env_workers 4
    --agent.seed_requests
)
OUTPUT=(
    --bipace.run_dir "$OUT"
    --logger.tensorboard_dir "$OUT/tensorboard"
    --ckpt.output_dir "$OUT/checkpoint"
    --ckpt.path "$OUT/checkpoints"
)
"$PYTHON" -m openrlhf_bipace.cli.train_ppo_ray \
    "${MODEL[@]}" "${DATASET[@]}" "${LEARNING[@]}" "${AGENT[@]}" "${OUTPUT[@]}" "$@"

# 3. Look at it.
"$PYTHON" -m openrlhf_bipace.cli.report "$OUT"
