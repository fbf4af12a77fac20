#!/usr/bin/env bash
# BiPACE_Q with Qwen2.5-1.5B-Instruct, the paper's recipe, on any number of nodes:
#   sbatch --nodes=1 slurm/bipace_1_5b.sh [alfworld|webshop|textcraft] [trainer flags ...]
# Submit from the repository's root. RUN_DIR, MODEL, TASKS and EVAL_TASKS (files of `bipace-data prepare`) may be set in
# the environment; ALFWorld's and WebShop's own data are in $BIPACE_DATA/<environment>.
#SBATCH --job-name=bipace_1_5b
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR2@600
set -euo pipefail
source "${BIPACE_ROOT:-${SLURM_SUBMIT_DIR:-.}}/slurm/lib/ray_cluster.sh"
bipace_setup
ENVIRONMENT=alfworld
case ${1:-} in alfworld | webshop | textcraft) ENVIRONMENT=$1 && shift ;; esac
export RUN_DIR=${RUN_DIR:-${BIPACE_RUNS:-$BIPACE_ROOT/runs}/${SLURM_JOB_NAME}_${ENVIRONMENT}_${SLURM_JOB_ID}}

case $ENVIRONMENT in # turns, tokens of a turn's prompt and response, how the episode advantage is scaled
    alfworld) TEST=valid_seen AGENT=(--agent.max_turns 50 --data.max_len 2560 --bipace.episode_mode mean_std) ;;
    webshop) TEST=test AGENT=(--agent.max_turns 15 --data.max_len 4608 --bipace.episode_mode mean) ;;
    textcraft) TEST=held_out AGENT=(--agent.max_turns 40 --data.max_len 4608 --bipace.episode_mode mean_std) ;;
esac
[[ $ENVIRONMENT == textcraft ]] || AGENT+=(--agent.data "${BIPACE_DATA:?}/$ENVIRONMENT" --agent.show_admissible)
AGENT+=(--agent.env "$ENVIRONMENT" --agent.context window --agent.history 2 --agent.max_turn_tokens 512)
RANKS=$((NODES * GPUS_PER_NODE))
PROMPTS=$((RANKS > 64 ? RANKS / 4 : 16)) # the paper's 16; beyond 64 GPUs more, so that every one has rollouts
LEARNING=( # the paper's values for 1.5B; docs/estimators.md
    --algo.advantage.estimator bipace_q --bipace.layer -12 --bipace.epsilon 0.05
    --bipace.gamma 0.95 --bipace.invalid_penalty 0.1 --algo.kl.use_loss --algo.kl.estimator k3 --algo.kl.init_coef 0.01
    --algo.advantage.is_correction_level token --actor.adam.lr 1e-6 --actor.lr_warmup_ratio 0
    --rollout.batch_size "$PROMPTS" --rollout.n_samples_per_prompt 8 --rollout.micro_batch_size 2
    --train.batch_size 8 --train.micro_batch_size 2 # 8 trajectories: about verl-agent's mini-batch of 256 turns
    --data.max_samples $((150 * PROMPTS))           # 150 iterations
)
LAYOUT=( # every GPU holds a share of the policy and, while it sleeps, an engine
    --actor.model_name_or_path "${MODEL:-Qwen/Qwen2.5-1.5B-Instruct}"
    --actor.num_nodes "$NODES" --actor.num_gpus_per_node "$GPUS_PER_NODE"
    --ref.num_nodes "$NODES" --ref.num_gpus_per_node "$GPUS_PER_NODE" --vllm.num_engines "$RANKS"
    --train.colocate_all --vllm.enable_sleep --ds.enable_sleep --vllm.gpu_memory_utilization 0.6
    --vllm.enable_prefix_caching --ds.zero_stage 2 --ds.packing_samples --actor.gradient_checkpointing_enable
)
DATASETS=(--data.prompt_dataset "${TASKS:-$BIPACE_ROOT/tasks/${ENVIRONMENT}_train.jsonl}"
    --eval.dataset "${EVAL_TASKS:-$BIPACE_ROOT/tasks/${ENVIRONMENT}_$TEST.jsonl}" --data.label_key label
    --eval.temperature 0.4 --eval.n_samples_per_prompt 1 --eval.steps 5)
OUTPUT=(--bipace.run_dir "$RUN_DIR" --ckpt.output_dir "$RUN_DIR/model" --ckpt.path "$RUN_DIR/checkpoints"
    --ckpt.save_steps 10 --ckpt.load_enable --logger.wandb.run_name "$(basename "$RUN_DIR")")

bipace_run "${BIPACE_PYTHON:-python}" -m openrlhf_bipace.cli.train_ppo_ray \
    "${LAYOUT[@]}" "${AGENT[@]}" "${LEARNING[@]}" "${DATASETS[@]}" "${OUTPUT[@]}" "$@"
