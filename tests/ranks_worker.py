"""One data-parallel rank: real DeepSpeed, upstream's PPO loop, our plan. Writes the gradients and the new weights."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

rank, world, port, stage, folder, entropy_coef = *map(int, sys.argv[1:5]), Path(sys.argv[5]), float(sys.argv[6])
os.environ |= {
    "RANK": str(rank),
    "LOCAL_RANK": "0",
    "WORLD_SIZE": str(world),
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": str(port),
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
from openrlhf_bipace.integration import cpu  # noqa: E402

if cpu.needed():
    os.environ |= cpu.WORKER_ENVIRONMENT | {cpu.DTYPE_VARIABLE: "fp32"}
    cpu.install()

import torch  # noqa: E402
from deepspeed.utils import safe_get_full_grad  # noqa: E402
from openrlhf.models import Actor  # noqa: E402
from openrlhf.utils.deepspeed import DeepspeedStrategy  # noqa: E402

from openrlhf_bipace.integration.planned import PlannedTrainer  # noqa: E402

NAMES = SimpleNamespace
adam = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
args = NAMES(
    local_rank=-1,
    ds=NAMES(param_dtype="bf16", zero_stage=stage, packing_samples=False, tensor_parallel_size=1, ring_attn_size=1),
    train=NAMES(dynamic_batch_enable=True, max_epochs=1, colocate_all=False, async_enable=False),
    actor=NAMES(
        eps_clip_low_high=(0.2, 0.2),
        dual_clip=None,
        loss_agg_mode="token-mean",
        policy_loss_type="ppo",
        aux_loss_coef=0,
        entropy_coef=entropy_coef,
    ),
    algo=NAMES(
        kl=NAMES(use_loss=True, init_coef=0.1, estimator="k3", unbiased_gradient=False),
        advantage=NAMES(
            is_correction_level="token",
            is_correction_mode="clip",
            is_correction_gating="ratio",
            is_correction_threshold=[0.5, 2.0],
        ),
    ),
    vllm=NAMES(sync_backend="gloo"),
)
strategy = DeepspeedStrategy(zero_stage=stage, max_norm=1.0, micro_train_batch_size=1, train_batch_size=1, args=args)
strategy.setup_distributed()
config = strategy.get_ds_train_config()
model = Actor(str(folder / "model"), attn_implementation="eager", param_dtype="bf16", ds_config=config)
settings = {"optim": "adam", "adam": adam, "muon": {}, "lr_scheduler": "constant", "max_norm": 1.0}
actor, optimizer, scheduler = strategy.prepare((model, settings | {"lr_warmup_ratio": 0, "scheduler_steps": 10}))
trainer = PlannedTrainer(
    strategy, actor, None, optimizer, scheduler, micro_train_batch_size=1, dataloader_pin_memory=False
)
gradients = []
step = strategy.optimizer_step


def record(*positional, **named):
    gradients.append({name: safe_get_full_grad(p).clone() for name, p in actor.model.module.named_parameters()})
    step(*positional, **named)


strategy.optimizer_step = record
for batch in torch.load(folder / "batches.pt", weights_only=False)[rank]:
    trainer.replay_buffer.append(batch)
status = trainer.ppo_train(kl_ctl=0.1)
weights = {name: p.detach().clone() for name, p in actor.model.module.named_parameters()}  # empty under ZeRO-3
torch.save({"gradients": gradients, "status": status, "weights": weights}, folder / f"rank{rank}.pt")
