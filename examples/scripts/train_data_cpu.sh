#!/usr/bin/env bash
# ALFWorld's games or WebShop's products through the real trainer on any machine, with a tiny model:
#
#   DATA=FOLDER train_data_cpu.sh alfworld|webshop [trainer flags]
#
# DATA is the folder with the environment's files (`bipace-data list` says more), OUT (default runs/<environment>_cpu)
# the run folder, ITERATIONS (default 3) how long to train, PYTHON the interpreter.
set -euo pipefail
ENV=${1:?alfworld or webshop}
shift
DATA=$(realpath "${DATA:?a folder with the files of $ENV, see bipace-data list}")
cd "$(dirname "$0")/../.."
case $ENV in # the warm start's size, tokens of a conversation, turns, tokens of a response
    alfworld) CLONE=(150 200) LENGTH=1024 TURNS=12 RESPONSE=32 ;;
    webshop) CLONE=(80 60) LENGTH=3072 TURNS=6 RESPONSE=64 ;;
    *) echo "train_data_cpu.sh: got $ENV, allowed: alfworld | webshop" >&2 && exit 2 ;;
esac
OUT=${OUT:-runs/${ENV}_cpu}
ITERATIONS=${ITERATIONS:-3}
PYTHON=${PYTHON:-.venv/bin/python}

# 1. A tiny Qwen2 that clones known solutions with every tenth command forgotten, and the tasks: 8 of the split train.
if [[ ! -d $OUT/warm_start ]]; then
    "$PYTHON" -m openrlhf_bipace.lab.warmstart --env "$ENV" --data "$DATA" --tasks 8 --out "$OUT/warm_start" \
        --tasks-out "$OUT" --train-tasks $((4 * ITERATIONS)) --steps "${CLONE_STEPS:-${CLONE[0]}}" \
        --episodes "${EPISODES:-${CLONE[1]}}"
fi

# 2. Train it.
MODEL=(
    --actor.model_name_or_path "$OUT/warm_start"
    --data.max_len "$LENGTH"
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
    --agent.env "$ENV"
    --agent.data "$DATA"
    --agent.template terse
    --agent.max_turns "$TURNS"
    --agent.max_turn_tokens "$RESPONSE"
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
