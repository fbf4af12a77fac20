"""How much of a GPU's memory a layout needs: lower bounds by the book, so that what is refused really cannot fit.

Bytes per parameter with bf16 training and Adam: 2 for weights, 2 for gradients, 12 for fp32 weights and both moments
(ZeRO, arXiv 1910.02054). ZeRO-1 shares the optimizer between the ranks, 2 the gradients too, 3 the weights too.
Activations are an upper estimate (every sequence at --data.max_len) and refuse nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GIB = 2**30
WEIGHT, GRADIENT, OPTIMIZER = 2, 2, 12  # bytes per parameter
ENGINE_OVERHEAD = 1.0  # GiB beside weights and cache: CUDA context and graphs, activations (measured by vLLM itself)


@dataclass(slots=True, frozen=True)
class ModelShape:
    """What memory depends on. Example: Qwen2.5-7B is ``ModelShape(7_615_616_512, 28, 3584, 4, 128, 152_064)``."""

    parameters: int
    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token over all layers, 16-bit."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2


@dataclass(slots=True, frozen=True)
class Training:
    """The flags that memory depends on."""

    ranks: int  # of the policy
    ref_ranks: int
    zero_stage: int
    adam_offload: bool
    ref_offload: bool
    micro_batch: int
    max_len: int
    tensor_parallel: int
    utilization: float  # share of a GPU that an engine takes
    engine_sleeps: bool
    policy_sleeps: bool
    gradient_checkpointing: bool
    gradient_bytes: int

    @classmethod
    def from_flags(cls, flags: Mapping[str, Any]) -> Training:
        """From upstream's flat flag names."""
        return cls(
            ranks=flags["actor.num_nodes"] * flags["actor.num_gpus_per_node"],
            ref_ranks=flags["ref.num_nodes"] * flags["ref.num_gpus_per_node"],
            zero_stage=flags["ds.zero_stage"],
            adam_offload=flags["ds.adam_offload"],
            ref_offload=flags["ref.offload"],
            micro_batch=flags["train.micro_batch_size"],
            max_len=flags["data.max_len"],
            tensor_parallel=flags["vllm.tensor_parallel_size"],
            utilization=flags["vllm.gpu_memory_utilization"],
            engine_sleeps=flags["vllm.enable_sleep"] and flags["train.colocate_all"],
            policy_sleeps=flags["ds.enable_sleep"],
            gradient_checkpointing=flags["actor.gradient_checkpointing_enable"],
            gradient_bytes=4 if flags["ds.grad_accum_dtype"] == "fp32" else GRADIENT,
        )


@dataclass(slots=True, frozen=True)
class Estimate:
    """GiB on one GPU, by phase. `needs` is the larger phase; `kv_tokens` the cache that the engine is left with."""

    weights: float
    gradients: float
    optimizer: float
    reference: float
    engine: float  # what the engine takes while it generates
    training: float  # all that must be there while the policy trains
    generation: float  # all that must be there while the engine generates
    activations: float  # upper estimate, in no phase
    kv_tokens: int

    @property
    def needs(self) -> float:
        """The larger phase."""
        return max(self.training, self.generation)


def estimate(members: frozenset[str], model: ModelShape, flags: Training, gpu_gib: float) -> Estimate:
    """Memory of a GPU that holds one rank of each of `members`. Critic and reward models are not counted."""
    per = model.parameters / GIB
    share = flags.ranks
    policy = "actor" in members
    weights = policy * WEIGHT * per / (share if flags.zero_stage == 3 else 1)
    gradients = policy * flags.gradient_bytes * per / (share if flags.zero_stage >= 2 else 1)
    optimizer = policy * (not flags.adam_offload) * OPTIMIZER * per / (share if flags.zero_stage >= 1 else 1)
    has_reference = "ref" in members and not flags.ref_offload
    reference = has_reference * WEIGHT * per / (flags.ref_ranks if flags.zero_stage == 3 else 1)
    has_engine = "engine" in members
    engine = has_engine * flags.utilization * gpu_gib
    asleep = flags.policy_sleeps and not flags.adam_offload
    # below ZeRO-3 gradients are freed after a step
    held = weights + reference + (0 if asleep else optimizer + (gradients if flags.zero_stage == 3 else 0))
    spare = engine - WEIGHT * per / flags.tensor_parallel - ENGINE_OVERHEAD
    return Estimate(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        reference=reference,
        engine=engine,
        training=weights + gradients + optimizer + reference + (0 if flags.engine_sleeps else engine),
        generation=held + engine if has_engine else 0.0,
        activations=policy * _activations(model, flags) / GIB,
        kv_tokens=int(has_engine * spare * GIB / (model.kv_bytes_per_token / flags.tensor_parallel)),
    )


def _activations(model: ModelShape, flags: Training) -> float:
    """Bytes: layer inputs (checkpointed) or about 34 values per layer and hidden unit, and fp32 logits."""
    tokens = flags.micro_batch * flags.max_len
    per_layer = 2 if flags.gradient_checkpointing else 34
    return tokens * (model.layers * model.hidden * per_layer + model.vocabulary * 4)


def shortfalls(estimates: Mapping[str, Estimate], flags: Training, gpu_gib: float) -> list[str]:
    """What cannot fit, one sentence each; `estimates` is keyed by the kinds of actors on a GPU, in words."""
    out = []
    for what, e in estimates.items():
        for phase, needs in (("training", e.training), ("generation", e.generation)):
            if needs > gpu_gib:
                out.append(
                    f"{what}: {phase} needs at least {needs:.1f} GiB of a GPU's {gpu_gib:g}, "
                    f"{needs - gpu_gib:.1f} GiB too much ({_parts(e, phase, flags)})"
                )
        if e.engine and e.kv_tokens < flags.max_len:
            out.append(
                f"{what}: the engine's KV cache holds {max(e.kv_tokens, 0)} tokens, --data.max_len {flags.max_len} "
                f"needs at least that many (raise --vllm.gpu_memory_utilization from {flags.utilization:g} or "
                f"--vllm.tensor_parallel_size from {flags.tensor_parallel})"
            )
    return out


def _parts(e: Estimate, phase: str, flags: Training) -> str:
    parts = {"weights": e.weights, "gradients": e.gradients, "optimizer": e.optimizer, "reference": e.reference}
    if phase == "training":
        parts["engine, not asleep"] = 0 if flags.engine_sleeps else e.engine
        advice = "; --ds.zero_stage 3, more ranks or --ds.adam_offload lower it"
    else:
        if flags.policy_sleeps or flags.zero_stage < 3:
            parts["gradients"] = 0.0
        if flags.policy_sleeps:
            parts["optimizer"] = 0.0
        parts["engine"] = e.engine
        advice = "; --ds.enable_sleep or a lower --vllm.gpu_memory_utilization lowers it"
    return " + ".join(f"{name} {value:.1f}" for name, value in parts.items() if value) + advice
