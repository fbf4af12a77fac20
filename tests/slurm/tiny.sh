#!/usr/bin/env bash
# A tiny model on `rooms` over the nodes of a job, for tests: half of the GPUs hold the policy, one an engine.
# TINY is a folder with model/ and train.jsonl; further arguments go to the trainer.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR2@60
set -euo pipefail
source "$BIPACE_TEST_ROOT/slurm/lib/ray_cluster.sh"
bipace_setup
export RUN_DIR=${RUN_DIR:?}
HALF=$((NODES * GPUS_PER_NODE / 2))
FLAGS=(
    --actor.model_name_or_path "$TINY/model" --actor.num_nodes 1 --actor.num_gpus_per_node "$HALF"
    --vllm.num_engines 1 --vllm.enable_prefix_caching
    --agent.env rooms --agent.template terse --agent.max_turns 4 --agent.max_turn_tokens 8 --agent.seed_requests
    --data.prompt_dataset "$TINY/train.jsonl" --data.label_key label --data.max_len 512
    --rollout.batch_size 4 --rollout.n_samples_per_prompt 4 --rollout.micro_batch_size 4
    --train.batch_size 16 --train.micro_batch_size 4
    --algo.advantage.estimator bipace_q --algo.advantage.is_correction_level token --algo.kl.init_coef 0
    --bipace.layer -2 --bipace.run_dir "$RUN_DIR" --actor.lr_warmup_ratio 0 --actor.adam.lr 1e-3
    --ckpt.output_dir "$RUN_DIR/final" --ckpt.path "$RUN_DIR/checkpoints" --ckpt.load_enable --launch.deadline 20
)
bipace_run "$BIPACE_PYTHON" -m openrlhf_bipace.cli.train_ppo_ray "${FLAGS[@]}" "$@"
