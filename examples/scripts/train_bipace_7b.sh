#!/usr/bin/env bash
# BiPACE on one node of 8 GPUs, as an OpenRLHF user would write it. Not run by this project yet: it has had no GPU node.
# TASKS names a JSONL file of tasks (column "label"), MODEL a Qwen2.5-7B-Instruct, OUT the run folder.
set -euo pipefail
MODEL=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
TASKS=${TASKS:?a JSONL file with one task a row}
OUT=${OUT:-runs/bipace_7b}

HOST=(
    --actor.model_name_or_path "$MODEL"
    --actor.num_nodes 1
    --actor.num_gpus_per_node 8
    --ref.num_nodes 1
    --ref.num_gpus_per_node 8
    --vllm.num_engines 8
    --vllm.gpu_memory_utilization 0.5
    --vllm.enable_prefix_caching
    --vllm.enable_sleep
    --train.colocate_all
    --ds.enable_sleep
    --ds.zero_stage 3
    --ds.packing_samples
    --actor.gradient_checkpointing_enable
)
DATA=(
    --data.prompt_dataset "$TASKS"
    --data.label_key label
    --data.max_len 6144
    --rollout.batch_size 16
    --rollout.n_samples_per_prompt 8
    --train.batch_size 64
)
LEARNING=(
    --algo.advantage.estimator bipace_q
    --bipace.layer -8
    --bipace.epsilon 0.10
    --algo.kl.use_loss
    --algo.kl.estimator k3
    --algo.kl.init_coef 0.01
    --algo.advantage.is_correction_level token
    --actor.adam.lr 1e-6
)
AGENT=(
    --agent.env textcraft
    --agent.context window
    --agent.history 2
    --agent.max_turns 40
    --agent.max_turn_tokens 512
)
OUTPUT=(
    --bipace.run_dir "$OUT"
    --ckpt.output_dir "$OUT/checkpoint"
    --ckpt.path "$OUT/checkpoints"
    --ckpt.save_steps 20
)
exec python -m openrlhf_bipace.cli.train_ppo_ray \
    "${HOST[@]}" "${DATA[@]}" "${LEARNING[@]}" "${AGENT[@]}" "${OUTPUT[@]}" "$@"
